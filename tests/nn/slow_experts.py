"""Experts written as loops over tokens and slots, in numpy and float64: what the fast layer is compared with."""

import numpy as np


def slow_choice(logits, spec, balance_bias=None):
    """Choose experts and weights of one token at a time."""
    experts, weights = [], []
    for row in np.asarray(logits, np.float64):
        softmax = np.exp(row - row.max()) / np.sum(np.exp(row - row.max()))
        scores = 1 / (1 + np.exp(-row)) if spec.score == "sigmoid" else softmax
        ranked = scores + (0 if balance_bias is None else np.asarray(balance_bias, np.float64))
        groups = np.split(np.arange(len(row)), spec.groups)
        top = 1 if spec.group_score == "max" else 2
        values = [np.sort(ranked[group])[-top:].sum() for group in groups]
        best = [groups[index] for index in np.argsort(values)[-spec.top_groups :]]
        open_experts = np.concatenate(best)
        chosen = open_experts[np.argsort(-ranked[open_experts], kind="stable")][: spec.top_k]
        own = scores[chosen]
        if spec.normalise or spec.score == "softmax_of_chosen":
            own = own / own.sum()
        experts.append(chosen)
        weights.append(own * spec.scale)
    return np.array(experts), np.array(weights)


def slow_experts(x, banks, experts, weights, activation):
    """Sum each token's experts, slot by slot."""
    banks = {name: np.asarray(bank, np.float64) for name, bank in banks.items()}
    bias = lambda name, e: banks.get(f"{name}_bias", np.zeros((len(banks["down_proj"]), 1)))[e]  # noqa: E731
    out = np.zeros(x.shape)
    for token, row in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            gate = row @ banks["gate_proj"][expert] + bias("gate_proj", expert)
            up = row @ banks["up_proj"][expert] + bias("up_proj", expert)
            hidden = activation(gate, up)
            out[token] += weight * (hidden @ banks["down_proj"][expert] + bias("down_proj", expert))
    return out

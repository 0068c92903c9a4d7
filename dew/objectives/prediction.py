"""What layers that predict further tokens add to the loss of the next one.

Entry points: `further_targets` on the host, `score_further`. Their sums are divided by the mass of the next tokens, as
in https://arxiv.org/abs/2412.19437, equation 24, so that they add up over rows, devices and accumulated batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dew.nn.router import Routing
from dew.objectives.base import Ratio

PREDICTION_LOSS = "prediction_loss"
"""Metric of the cross entropy of further tokens, over all that are predicted."""
DEFAULT_WEIGHT = 0.1


@dataclasses.dataclass(frozen=True)
class Further:
    """What the layers that predict further tokens say of a batch.

    Attributes:
        loss: Sum of the cross entropies of all layers, over the count of tokens that they predict.
        mean: Mean over the layers of those sums.
        routing: Statistics of the layers with experts.
    """

    loss: Ratio
    mean: Any
    routing: tuple[Routing, ...]


def checked_weight(weight: float | None, module: Any) -> float:
    """Give the weight of the further tokens in the loss; 0 computes none of them.

    Args:
        weight: What was asked for; None takes 0.1 where the module predicts further tokens.
        module: The module under training.

    Raises:
        ValueError: If it is asked for and the module has no such layers, or it is no weight.
    """
    has_layers = getattr(module, "prediction", None) is not None
    if weight is None:
        return DEFAULT_WEIGHT if has_layers else 0.0
    if not has_layers:
        raise ValueError(
            "mtp_weight weighs layers that predict further tokens, and this module has none. Leave it out, or give the "
            f"module a PredictionSpec as prediction. Received: mtp_weight={weight!r}"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ValueError(f"mtp_weight must be a finite number of 0 or more. Received: mtp_weight={weight!r}")
    return float(weight)


def further_targets(
    tokens: np.ndarray, weights: np.ndarray, segments: np.ndarray | None, depth: int
) -> dict[str, np.ndarray]:
    """Shift tokens for each layer, before rows or positions are split over devices.

    Layer k, counted from 1, reads token t + k at position t and predicts token t + k + 1. It does so where all tokens
    from t on lie in one document, none of them is padding, and the last is scored as a next token too. Positions whose
    token t + k lies elsewhere are padding to the layer.

    Args:
        tokens: Tokens, int [B, T + 1].
        weights: Whether token t + 1 is scored as the next one of t, bool [B, T].
        segments: Documents, int [B, T + 1]; None means one a row.
        depth: Layers.

    Returns:
        For each layer `targets_k` int32 [B, T], `weights_k` float32 [B, T] and, where a position may be padding,
        `segment_ids_k` int32 [B, T].
    """
    documents = np.ones(tokens.shape, np.int32) if segments is None else segments
    follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
    reads, prepared = np.ones(weights.shape, bool), {}
    for layer in range(1, depth + 1):
        reads &= _shifted(follows, layer - 1)
        prepared[f"targets_{layer}"] = _shifted(tokens[:, 1:], layer)
        prepared[f"weights_{layer}"] = (reads & _shifted(weights, layer)).astype(np.float32)
        if segments is not None or layer > 1:
            prepared[f"segment_ids_{layer}"] = np.where(reads, documents[:, :-1], 0).astype(np.int32)
    return prepared


def _shifted(values: np.ndarray, steps: int) -> np.ndarray:
    """Move rows to the left, zeros in from the right."""
    return np.pad(values[:, steps:], ((0, 0), (0, min(steps, values.shape[1]))))


def score_further(
    module: Any,
    variables: Mapping[str, Any],
    hidden: jax.Array,
    batch: Mapping[str, Any],
    token_loss: Callable[..., tuple[jax.Array, ...]],
    training: Mapping[str, Any],
) -> Further:
    """Score a prepared batch with the layers that predict further tokens.

    Args:
        module: A `CausalTransformer` with such layers.
        variables: Its variables.
        hidden: The output of its last norm.
        batch: What `prepare` returned.
        token_loss: Function of (hidden states, targets, weights) that gives the sum of the cross entropies, the count
            of tokens that are predicted and the sum of the weights.
        training: Whether this is a training step, `train`, and its `rngs`.
    """
    layers = range(1, module.prediction.depth + 1)
    further = [
        {
            "tokens": batch["targets" if layer == 1 else f"targets_{layer - 1}"],
            "segment_ids": batch.get(f"segment_ids_{layer}"),
            "weights": batch[f"weights_{layer}"],
        }
        for layer in layers
    ]
    given = (hidden, further, batch.get("positions"), training["train"])
    read, routing = module.apply(variables, *given, rngs=training["rngs"], method="further_hidden_states")
    sums = [
        token_loss(states, batch[f"targets_{layer}"], batch[f"weights_{layer}"])
        for layer, states in zip(layers, read, strict=True)
    ]
    total = sum(each[0] for each in sums)
    return Further(Ratio(total, sum(each[2] for each in sums)), total / len(sums), routing)

"""Make the reference checkpoints that parity tests load: `python tools/make_fixtures.py [--to DIRECTORY] [NAME ...]`.

Needs transformers and torch. A fixture is a directory with config.json, model.safetensors and reference.npz: tokens,
the reference's float32 logits, the attention entropy that shows the weights are peaked, and what its embeddings and
first norm give in bfloat16. `rotary.npz` holds rotary tables. `versions.json` says what made them.
"""

import argparse
import copy
import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers
from fixture_configs import FIXTURES, SHAPE
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_untruncated": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "truncate": False,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": 4096,
    },
    "longrope_factor": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
}
POSITIONS = (0, 1, 255, 4095, 4096, 8193)
ROWS, LENGTH = 2, 48
# Entropy of attention over its maximum, averaged over positions that see at least 8 tokens: less than half is peaked.
LARGEST_ENTROPY = 0.5
# Change of the last logits when the first half of a row changes.
LEAST_MEMORY = 0.02
# Of the largest logit, between the reference in float32 and in float64. The parity tests allow 1e-5.
LARGEST_ROUNDING = 2e-6
# The same of gated delta nets: noise in their embeddings comes out 19 to 74 times as large, of Llama 11 to 17 times. Of
# eight seeds of Qwen3-Next none rounds by less than 2.7e-6, or 2.0e-6 with the rule itself in float64.
LARGEST_DELTA_ROUNDING = 4e-6
DELTA_FAMILIES = ("qwen3_next", "qwen3_5")
# Between the logits of the last expert chosen and the first that is not: far above any rounding of them.
SMALLEST_MARGIN = 2e-3


SHARPENED = tuple(
    f"{name}.weight"
    for name in ("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn", "q_b_proj", "kv_a_proj_with_mqa")
)


ROUTERS = ("gate.weight", "router.weight")


def randomise(model, generator, sharpness):
    """Draw weights whose norms are far from one, whose biases are not zero, and whose attention is peaked."""
    gemma = model.config.model_type.startswith("gemma")
    centred = gemma or model.config.model_type.startswith(DELTA_FAMILIES)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for name, weight in [*model.named_parameters(), *biases]:
        draw = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            # Slow decays, so that a row remembers its beginning; slower ones where the reference takes differences of
            # their sums, whose rounding grows with them.
            value = 0.5 * draw - (1.75 if "linear_attn" in name else 1.0)
        elif name.endswith("dt_bias"):
            value = 0.7 * draw - 1.0
        elif name.endswith((".D", "norm.weight", "norm_f.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
            value = 1.0 + 0.3 * draw
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                value = value * math.sqrt(sharpness)
            value = value - 1.0 if centred and not name.endswith("linear_attn.norm.weight") else value
        elif name.endswith((".bias", "_bias")):
            value = 0.3 * draw
        elif name.endswith(".sinks"):
            value = draw
        elif any(table in name for table in ("embed_tokens", "embed_in", "embeddings", "wte", "wpe")):
            value = 0.1 * draw  # small beside eps ** 0.5, so that a wrong eps shows
            value = (
                value / weight.shape[1] ** 0.5 if gemma else value / getattr(model.config, "embedding_multiplier", 1)
            )
        else:
            # A kernel is [out, in], an expert's too, GPT-2's and an expert's of gpt-oss [in, out], the taps of a
            # convolution [channels, 1, taps].
            inputs = 0 if ".c_" in name and model.config.model_type == "gpt2" else -1
            inputs = -2 if ".experts." in name and model.config.model_type == "gpt_oss" else inputs
            value = draw / math.sqrt(weight.shape[inputs])
            if name.endswith(ROUTERS):
                value = 2 * value
            if name.endswith(SHARPENED):
                value = value * math.sqrt(sharpness)
        weight.data.copy_(value)


def entropy(attentions):
    """Mean entropy of the attention rows over that of a uniform row over the tokens they see."""
    rows = torch.stack(attentions)[..., 8:, :]
    values = -(rows * rows.clamp_min(1e-30).log()).sum(-1)
    return (values / (rows > 0).sum(-1).float().log()).mean().item()


def memory(model, tokens):
    """Say how far the last 8 tokens' logits move when the first half of a row is another, beside their own size."""
    other = tokens.clone()
    other[:, : LENGTH // 2] = (other[:, : LENGTH // 2] + 1) % model.config.vocab_size
    with torch.no_grad():
        logits, moved = (model(each).logits[:, -8:] for each in (tokens, other))
    return ((logits - moved).abs().mean() / logits.abs().mean()).item()


def sharpened(kind, config, tokens, seed):
    """Sharpen attention until it is peaked; returns the model, its outputs and the entropy."""
    for sharpness in (1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 5.0, 7.0, 10.0):
        model = kind(config).eval().float()
        randomise(model, torch.Generator().manual_seed(seed), sharpness)
        with torch.no_grad():
            if config.model_type == "mamba2":
                return model, model(tokens), math.nan
            out = model(tokens, output_attentions=True)
        ratio = entropy([each for each in out.attentions if each is not None])
        if ratio < LARGEST_ENTROPY * 0.95:
            return model, out, ratio
    raise RuntimeError(f"attention stays flat, entropy {ratio:.2f} of uniform")


def make(directory, kind, config):
    """Make one fixture from the first seed on which the reference's own rounding is small beside the tolerance."""
    config._attn_implementation = config._experts_implementation = "eager"
    for seed in range(50):
        tokens = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
        model, out, ratio = sharpened(kind, config, tokens, seed)
        model.save_pretrained(directory)
        remembered = memory(model, tokens)
        rounded = rounding(model.double(), tokens, out.logits)
        decided = margin(model, tokens) > SMALLEST_MARGIN
        largest = LARGEST_DELTA_ROUNDING if config.model_type.startswith(DELTA_FAMILIES) else LARGEST_ROUNDING
        if rounded < largest and remembered > LEAST_MEMORY and decided:
            break
    else:
        raise RuntimeError(f"{directory}: the reference itself rounds by {rounded:.1e}, or forgets, on every seed")
    (directory / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        directory / "reference.npz",
        tokens=tokens.numpy(),
        logits=out.logits.numpy(),
        entropy=np.float32(ratio),
        memory=np.float32(remembered),
        **in_bfloat16(kind, config, directory, tokens),
    )
    print(
        f"{directory.name}: seed {seed}, entropy {ratio:.2f} of uniform, logits up to {out.logits.abs().max():.2f}, "
        f"float32 rounding of the reference {rounded:.1e} of that"
    )


def rounding(exact_model, tokens, logits):
    """Say how far logits are from those of the model in float64, beside the largest."""
    with torch.no_grad():
        exact = exact_model(tokens).logits
    return ((logits - exact).abs().max() / exact.abs().max()).item()


def margin(model, tokens):
    """Find the smallest margin of a router's choice over all tokens and layers; infinite without routers."""
    margins = [math.inf]

    def measure(module, _, result):
        for scores, count in choices(module, result[0]):
            ranked = scores.sort(dim=-1, descending=True).values
            margins.append((ranked[:, count - 1] - ranked[:, count]).min().item())

    routers = [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]
    handles = [each.register_forward_hook(measure) for each in routers]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return min(margins)


def choices(router, logits):
    """List what a router chooses among and how many: experts, or groups of them and the experts in those chosen."""
    bias = getattr(router, "e_score_correction_bias", None)
    scores = logits if bias is None else logits.sigmoid() + bias
    groups, count = (getattr(router, name, None) or 1 for name in ("num_group", "topk_group"))
    if groups == count:
        return [(scores, router.top_k)]
    grouped = scores.view(len(scores), groups, -1)
    best = grouped.max(dim=-1).values if bias is None else grouped.topk(2, dim=-1).values.sum(dim=-1)
    is_open = torch.zeros_like(best).scatter(1, best.topk(count, dim=-1).indices, 1.0).bool()
    return [(best, count), (grouped.masked_fill(~is_open[:, :, None], -1e9).flatten(1), router.top_k)]


def in_bfloat16(kind, config, directory, tokens):
    """Give what one row's embeddings and first norm are in bfloat16, as the bits: casts that float32 does not show."""
    config._attn_implementation = config._experts_implementation = "eager"
    model = kind.from_pretrained(directory, dtype=torch.bfloat16, experts_implementation="eager")
    seen = {}
    layer = next(iter(getattr(model.base_model, "layers", None) or model.base_model.h))
    first = getattr(layer, "input_layernorm", None) or getattr(layer, "ln_1", None) or getattr(layer, "norm", None)
    norm = first or layer.post_attention_layernorm
    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(embedded=args[0]), with_kwargs=True),
        norm.register_forward_hook(lambda _, args, result: seen.update(read=args[0], normed=result)),
    ]
    with torch.no_grad():
        model(tokens[:1, :16])
    for handle in handles:
        handle.remove()
    if norm is first:
        del seen["read"]  # the embeddings
    return {f"bfloat16_{name}": value[0].view(torch.int16).numpy() for name, value in seen.items()}


def make_rotary(path):
    """Make the rotary tables of every kind of scaling, of rows that end at each of `POSITIONS`."""
    arrays = {}
    for name, scaling in SCALINGS.items():
        config = LlamaConfig(
            **SHAPE | {"max_position_embeddings": 16384}, rope_parameters={"rope_theta": 50000.0, **scaling}
        )
        for position in POSITIONS:
            # A module of its own: some scalings remember the longest row they saw.
            cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[position]]))
            arrays[f"{name}/{position}"] = torch.stack([cos[0, 0], sin[0, 0]]).numpy()[:, : cos.shape[-1] // 2]
        arrays[f"{name}/config"] = np.frombuffer(json.dumps(config.to_dict()["rope_parameters"]).encode(), np.uint8)
    np.savez_compressed(path, **arrays)


def main():
    """Make the named fixtures, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path(__file__).resolve().parents[1] / "tests" / "fixtures")
    parser.add_argument("names", nargs="*", choices=[[], "rotary", *FIXTURES])
    options = parser.parse_args()
    for name in options.names or ["rotary", *FIXTURES]:
        if name == "rotary":
            make_rotary(options.to / "rotary.npz")
            continue
        kind, fields = FIXTURES[name]
        (options.to / name).mkdir(parents=True, exist_ok=True)
        make(options.to / name, kind, kind.config_class(**copy.deepcopy(fields)))  # some classes write into them
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    (options.to / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()

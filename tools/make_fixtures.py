"""Make the small reference checkpoints that the parity tests load: `python tools/make_fixtures.py [directory]`.

Needs transformers and torch. A fixture is a directory with config.json, model.safetensors and reference.npz: tokens,
the reference's float32 logits, and the attention entropy that shows the weights are peaked. `versions.json` says what
made it.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
FIXTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=PLAIN)),
    "llama_untied": (
        LlamaForCausalLM,
        LlamaConfig(
            **SHAPE, head_dim=16, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True, rope_parameters=PLAIN)),
    "qwen3_untied": (
        Qwen3ForCausalLM,
        Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False, rope_parameters=YARN),
    ),
}
ROWS, LENGTH = 2, 48
# Entropy of attention over its maximum, averaged over positions that see at least 8 tokens: less than half is peaked.
LARGEST_ENTROPY = 0.5
# Of the largest logit, between the reference in float32 and in float64. The parity tests allow 1e-5.
LARGEST_ROUNDING = 2e-6


def randomise(model, generator, sharpness):
    """Draw weights whose norms are far from one, whose biases are not zero, and whose attention is peaked."""
    for name, weight in model.named_parameters():
        draw = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1.0 + 0.3 * draw
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                value = value * math.sqrt(sharpness)
        elif name.endswith(".bias"):
            value = 0.3 * draw
        elif "embed_tokens" in name:
            value = 0.1 * draw  # small beside eps ** 0.5, so that a wrong eps shows
        else:
            value = draw / math.sqrt(weight.shape[1])
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                value = value * math.sqrt(sharpness)
        weight.data.copy_(value)


def entropy(attentions):
    """Mean entropy of the attention rows over that of a uniform row."""
    rows = torch.stack(attentions)[..., 8:, :]
    values = -(rows * rows.clamp_min(1e-30).log()).sum(-1)
    sizes = torch.arange(9, rows.shape[-1] + 1, dtype=torch.float32).log()
    return (values / sizes).mean().item()


def sharpened(kind, config, tokens, seed):
    """Sharpen attention until it is peaked; returns the model, its outputs and the entropy."""
    for sharpness in (1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 5.0):
        model = kind(config).eval().float()
        randomise(model, torch.Generator().manual_seed(seed), sharpness)
        with torch.no_grad():
            out = model(tokens, output_attentions=True)
        ratio = entropy(out.attentions)
        if ratio < LARGEST_ENTROPY * 0.95:
            return model, out, ratio
    raise RuntimeError(f"attention stays flat, entropy {ratio:.2f} of uniform")


def make(directory, kind, config):
    """Make one fixture from the first seed on which the reference's own rounding is small beside the tolerance."""
    config._attn_implementation = "eager"
    for seed in range(50):
        tokens = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
        model, out, ratio = sharpened(kind, config, tokens, seed)
        model.save_pretrained(directory)
        with torch.no_grad():
            exact = model.double()(tokens).logits
        scale = exact.abs().max()
        rounding = ((out.logits - exact).abs().max() / scale).item()
        if rounding < LARGEST_ROUNDING:
            break
    else:
        raise RuntimeError(f"{directory}: the reference itself rounds by {rounding:.1e} on every seed")
    (directory / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        directory / "reference.npz", tokens=tokens.numpy(), logits=out.logits.numpy(), entropy=np.float32(ratio)
    )
    print(
        f"{directory.name}: seed {seed}, entropy {ratio:.2f} of uniform, logits up to {scale:.2f}, float32 rounding of "
        f"the reference {rounding:.1e} of that"
    )


def main():
    """Make every fixture."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "tests" / "fixtures")
    for name, (kind, config) in FIXTURES.items():
        directory = root / name
        directory.mkdir(parents=True, exist_ok=True)
        make(directory, kind, config)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    (root / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()

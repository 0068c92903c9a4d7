"""Make the packed gpt-oss checkpoint that the tests read: `python tools/make_mxfp4_fixture.py [directory]`.

Needs transformers and torch. Experts are random blocks and scales, the rest is bfloat16; `reference.npz` holds tokens,
the float32 logits of transformers' own dequantisation, and blocks of all bytes with scales of all sizes, expanded.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from fixture_configs import FOUR_EXPERTS, YARN
from make_fixtures import (
    LARGEST_ENTROPY,
    LARGEST_ROUNDING,
    LENGTH,
    ROWS,
    SMALLEST_MARGIN,
    entropy,
    margin,
    randomise,
    rounding,
)
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SHARPNESS = 2.5
# Exponents that give random values the size of a kernel's.
SCALES = (121, 125)


def packed(model, generator):
    """State of a model in bfloat16, with random blocks and scales for its experts."""
    state = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = value.to(torch.bfloat16).contiguous()
            continue
        experts, inputs, outputs = value.shape
        shape = (experts, outputs, inputs // 32)
        state[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        state[f"{name}_scales"] = torch.randint(*SCALES, shape, generator=generator).to(torch.uint8)
    return state


def expanded():
    """Blocks that hold every byte under scales from the smallest to the largest, and what they are in bfloat16."""
    blocks = torch.arange(256).roll(3).reshape(1, 8, 2, 16).to(torch.uint8)
    scales = torch.tensor([2, 60, 110, 120, 126, 127, 128, 129, 130, 131, 140, 160, 200, 240, 250, 252])
    scales = scales.reshape(1, 8, 2).to(torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    return {"blocks": blocks.numpy(), "scales": scales.numpy(), "values": values.view(torch.int16).numpy()}


def make(out, config, seed):
    """Write one checkpoint; returns whether the reference's logits are fit to compare with."""
    generator = torch.Generator().manual_seed(seed)
    model = GptOssForCausalLM(config).eval()
    randomise(model, generator, SHARPNESS)
    out.mkdir(parents=True, exist_ok=True)
    save_file(packed(model, generator), out / "model.safetensors", metadata={"format": "pt"})
    written = config.to_diff_dict() | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    written["quantization_config"] = Mxfp4Config(modules_to_not_convert=["model.layers.*.self_attn"]).to_dict()
    (out / "config.json").write_text(json.dumps(written, indent=2, default=str) + "\n")
    model = GptOssForCausalLM.from_pretrained(
        out,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    tokens = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=generator)
    with torch.no_grad():
        given = model(tokens, output_attentions=True)
    rounded = rounding(model.double(), tokens, given.logits)
    ratio, decided = entropy(given.attentions), margin(model, tokens)
    print(f"seed {seed}: entropy {ratio:.2f} of uniform, margin {decided:.1e}, rounding {rounded:.1e}")
    np.savez_compressed(
        out / "reference.npz",
        tokens=tokens.numpy(),
        logits=given.logits.numpy(),
        entropy=np.float32(ratio),
        **expanded(),
    )
    return ratio < LARGEST_ENTROPY and decided > SMALLEST_MARGIN and rounded < LARGEST_ROUNDING


def main(out):
    """Make it from the first seed that is fit."""
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **FOUR_EXPERTS,
        swiglu_limit=2.0,
        sliding_window=8,
        max_position_embeddings=256,
        rope_parameters=YARN | {"rope_theta": 500.0, "truncate": False},
    )
    if not any(make(out, config, seed) for seed in range(50)):
        raise RuntimeError("no seed gives logits that are fit to compare with")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/fixtures/gpt_oss_mxfp4"))

"""Tiny models and batches that many tests share: small enough to compile in a second, large enough to split."""

import dataclasses
from typing import Any

import numpy as np

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec

VOCAB_SIZE = 64


def tiny_layer(**attention: Any) -> LayerSpec:
    """Build a block of width 32: 4 query heads and 2 key/value heads of 8, hidden width 64.

    Args:
        **attention: Fields of `AttentionSpec` to change.
    """
    norm = NormSpec(eps=1e-5)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rotary=RotarySpec(theta=10000.0))
    return LayerSpec(mixer=dataclasses.replace(spec, **attention), mlp=MlpSpec(features=64), norm=norm)


def tiny_decoder(**overrides: Any) -> CausalTransformer:
    """Build a decoder of 4 equal blocks over 64 tokens, in float32.

    Args:
        **overrides: Fields of `CausalTransformer` to change; `num_layers` changes the number of blocks.
    """
    num_layers = overrides.pop("num_layers", 4)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "features": 32,
        "layers": (tiny_layer(),) * num_layers,
        "norm": NormSpec(eps=1e-5),
        "max_length": 64,
    }
    return CausalTransformer(**(fields | overrides))


def tiny_batch(rows: int = 8, length: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw random tokens with a mask that scores a different number of them in each row, none in the last.

    Args:
        rows: Rows.
        length: Positions the model reads; a row has one token more.
        seed: Seed of the draw.

    Returns:
        `tokens` [rows, length + 1] int32 and `loss_mask` of the same shape.
    """
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, VOCAB_SIZE, (rows, length + 1)).astype(np.int32)
    mask = generator.random((rows, length + 1)) < np.linspace(0.2, 1.0, rows)[:, None]
    mask[-1] = False
    return {"tokens": tokens, "loss_mask": mask}

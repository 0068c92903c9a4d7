"""Both ends of a decoder: lookup of tokens and learned positions, and projection to logits.

Entry points: `EmbeddingSpec`, `HeadSpec`, `Embedding`, `project`. The token table is [vocabulary, width] in both
uses, tied or not.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from dew.arrays import Array, Float, Int
from dew.nn.linear import INITIAL_SCALE
from dew.nn.sharding import constrain, declare, route_lookup_gradient

TABLE_NAMES = ("vocab", "embed")
"""Logical names of a token table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """What happens to looked-up rows before the first block.

    Attributes:
        scale: Factor on the rows of the token table.
        round_scale: Whether the factor is rounded to the compute dtype first (Gemma), rather than multiplied in
            float32 (Granite). The two differ in bfloat16.
        positions: Rows of a table of learned positions that are added (GPT-2); None means no such table.
    """

    scale: float = 1.0
    round_scale: bool = False
    positions: int | None = None

    def __post_init__(self) -> None:
        if self.positions is not None and self.positions < 1:
            raise ValueError(f"a table of positions needs a row or more. Received: positions={self.positions}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """What happens to the products with the vocabulary.

    Attributes:
        scale: Factor on the logits (Cohere's scale, one over Granite's divisor).
        softcap: Bound c of the logits after it, c * tanh(logit / c); None leaves them.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"a softcap must be positive, None for none. Received: softcap={self.softcap}")


class Embedding(nn.Module):
    """A table with one row per token, or per position.

    Attributes:
        vocab_size: Rows.
        features: Width of a row.
        param_dtype: Storage dtype.
    """

    vocab_size: int
    features: int
    param_dtype: Any = "float32"

    def setup(self) -> None:
        """Declare the table."""
        shape = (self.vocab_size, self.features)
        initializer = nn.initializers.normal(INITIAL_SCALE)
        self.embedding = declare(self, "embedding", shape, TABLE_NAMES, initializer, self.param_dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Look up the rows of `tokens`."""
        names = ("activation_batch", "activation_length", "activation_embed")
        rows = jnp.take(self.embedding, tokens, axis=0)
        shape = (self.vocab_size, self.features)
        return constrain(route_lookup_gradient(rows, names, shape, TABLE_NAMES), names)


def scaled_rows(rows: Float[Array, "B T D"], spec: EmbeddingSpec) -> Float[Array, "B T D"]:
    """Multiply looked-up rows by the factor of their spec, rounded where the spec says."""
    factor = jnp.asarray(spec.scale, rows.dtype) if spec.round_scale else spec.scale
    return scaled(rows, factor)


def scaled(x: Float[Array, "..."], factor: Any) -> Float[Array, "..."]:
    """Multiply in float32 and round once to the dtype of `x`; a factor of 1 leaves `x` alone."""
    if isinstance(factor, float | int) and factor == 1:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def project(
    hidden: Float[Array, "B T D"], table: Float[Array, "V D"], spec: HeadSpec = HeadSpec()
) -> Float[Array, "B T V"]:
    """Score every token of the vocabulary: the hidden states times the table, in float32.

    Args:
        hidden: Output of the last norm.
        table: The token table, or the untied head in the same orientation.
        spec: Factor and bound of the products.

    Returns:
        Logits, accumulated and returned in float32.
    """
    # A product with the transposed table rather than einsum "BTD,VD->BTV": XLA on CPU then reads the table a third
    # faster for a single row (49,152 x 576: 4.9 ms against 7.0 ms of processor time), and alike for eight.
    logits = jnp.matmul(hidden, table.astype(hidden.dtype).T, preferred_element_type=jnp.float32)
    logits = scaled(logits, spec.scale)
    if spec.softcap is not None:
        logits = spec.softcap * jnp.tanh(logits / spec.softcap)
    return constrain(logits, ("activation_batch", "activation_length", "activation_vocab"))

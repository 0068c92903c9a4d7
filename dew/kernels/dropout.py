"""Dropout whose masks follow from where a number stands: its layer, row, position, and feature.

Entry points: `Dropout` (https://jmlr.org/papers/v15/srivastava14a.html), `AttentionDropout`. Masks are hashes of a key
and these coordinates (Threefry, https://doi.org/10.1145/2063384.2063405), so none depends on how a batch is cut over
devices, microbatches and loops, and a backward pass that computes a block again draws the same.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec

from dew.arrays import Array, Bool, Float, Int
from dew.kernels.visibility import Visibility

Words = tuple[Array, Array]
"""Two words of 32 bits: a key, or what a key makes of two counters; arrays hold a pair at each place."""

EMBEDDING, MIXER, MLP, PROBABILITIES = range(4)
"""What has masks of its own, in a layer or before all of them."""


class MissingKeyError(ValueError):
    """A training step drops, and was given no random key."""


class Dropout(struct.PyTreeNode):
    """The dropout of a training step, or of one of its layers.

    Attributes:
        words: Key of the step or layer.
        rows: Number of each row in the whole batch.
        embedding_rate: Share of embeddings that become 0.
        residual_rate: Share of what blocks add that becomes 0.
        attention_rate: Share of attention probabilities that becomes 0.
    """

    words: Words
    rows: Int[Array, "B 1"]
    embedding_rate: float = struct.field(pytree_node=False, default=0.0)
    residual_rate: float = struct.field(pytree_node=False, default=0.0)
    attention_rate: float = struct.field(pytree_node=False, default=0.0)

    @classmethod
    def of_batch(cls, key: Any, rows: int, **rates: float) -> "Dropout":
        """Make the dropout of a step.

        Args:
            key: Random key of the step, of any generator.
            rows: Rows of the whole batch.
            **rates: The rates.
        """
        first, second = jax.random.bits(key, (2,), jnp.uint32)
        return cls(words=(first, second), rows=jnp.arange(rows, dtype=jnp.int32)[:, None], **rates)

    def of_layer(self, number: Array | int) -> "Dropout":
        """Give the dropout of a layer, by its number in the whole model."""
        return self.replace(words=fold(self.words, number, 1))

    def of_embeddings(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Drop embeddings."""
        return self._dropped(x, self.embedding_rate, EMBEDDING)

    def of_residual(self, x: Float[Array, "B T D"], site: int) -> Float[Array, "B T D"]:
        """Drop some of what a part of a block adds, `MIXER` or `MLP`."""
        return self._dropped(x, self.residual_rate, site)

    def of_attention(self, num_heads: int) -> "AttentionDropout | None":
        """Give what drops a layer's attention probabilities; None where nothing does."""
        if not self.attention_rate:
            return None
        return AttentionDropout(
            words=fold(self.words, PROBABILITIES, 0),
            rows=self.rows[:, 0],
            heads=jnp.arange(num_heads, dtype=jnp.int32),
            rate=self.attention_rate,
        )

    def _dropped(self, x: Array, rate: float, site: int) -> Array:
        if not rate:
            return x
        tokens = fold(fold(self.words, site, 0), self.rows, jnp.arange(x.shape[1])[None])
        tokens = tokens[0][..., None], tokens[1][..., None]
        return dropped(x, keeps(fold(tokens, jnp.arange(x.shape[2]), 0), rate), rate)


class AttentionDropout(struct.PyTreeNode):
    """The dropout of one layer's attention probabilities, of some rows and heads.

    Attributes:
        words: Key of these masks.
        rows: Number of each row in the whole batch, [B].
        heads: Number of each query head in the layer, [N].
        rate: Share of the probabilities that become 0.
    """

    # Any: as an argument of a custom gradient, JAX makes one of placeholders.
    words: Any
    rows: Any
    heads: Any
    rate: float = struct.field(pytree_node=False)

    def applied(
        self, weights: Float[Array, "B K G T S"], query_slots: Int[Array, "#B T"], key_slots: Int[Array, "#B S"]
    ) -> Float[Array, "B K G T S"]:
        """Drop probabilities.

        Args:
            weights: Probabilities, or what is multiplied by them, of query heads by their key/value heads.
            query_slots: Place of each query in the row.
            key_slots: Place of each key in the same row.
        """
        heads = self.heads.reshape(weights.shape[1:3])
        one, other = fold(self.words, self.rows[:, None, None], heads)
        pairs = query_slots[:, None, None, :, None], key_slots[:, None, None, None, :]
        words = fold((one[..., None, None], other[..., None, None]), *pairs)
        return dropped(weights, keeps(words, self.rate), self.rate)

    def of_heads(self, first: Array | int, count: int) -> "AttentionDropout":
        """Give the dropout of consecutive heads."""
        return self.replace(heads=jax.lax.dynamic_slice_in_dim(self.heads, first, count))

    def specs(self, rows: Any, heads: Any) -> "AttentionDropout":
        """Say how its arrays are split where rows and heads are split over mesh axes."""
        whole = PartitionSpec()
        return self.replace(words=(whole, whole), rows=PartitionSpec(rows), heads=PartitionSpec(heads))


def drop_probabilities(dropout: AttentionDropout | None, weights: Array, visibility: Visibility) -> Array:
    """Drop probabilities, or what is multiplied by them; None drops nothing.

    Args:
        dropout: The dropout.
        weights: As `AttentionDropout.applied`.
        visibility: Where queries and keys are.
    """
    if dropout is None:
        return weights
    return dropout.applied(weights, visibility.query_slots, visibility.key_slots)


def fold(words: Words, first: Array | int, second: Array | int) -> Words:
    """Make a key of a key and two counters, or of arrays of them, which broadcast.

    Args:
        words: The key.
        first: A counter, taken modulo 2 ** 32.
        second: Another.
    """
    first, second = (jnp.asarray(each).astype(jnp.uint32) for each in (first, second))
    # Both counters are mapped by a vmap, or neither: the primitive's lowering on CPU needs them alike.
    counters = first + (second - second), second + (first - first)
    made: list[Array] = threefry2x32_p.bind(*jnp.broadcast_arrays(*words, *counters))
    return made[0], made[1]


def keeps(words: Words, rate: float) -> Bool[Array, "..."]:
    """Say what is kept where a rate drops: each place with probability 1 - rate."""
    return words[0] >= jnp.uint32(math.floor(rate * 2**32))


def dropped(x: Float[Array, "..."], kept: Bool[Array, "..."], rate: float) -> Float[Array, "..."]:
    """Set to 0 what is not kept and divide the rest by 1 - rate."""
    # In float32: 0.9 in bfloat16 is 0.2% less.
    return jnp.where(kept, x.astype(jnp.float32) / (1 - rate), 0).astype(x.dtype)


def checked_rate(name: str, rate: Any) -> None:
    """Check a rate.

    Args:
        name: Its name.
        rate: Share of numbers that become 0.

    Raises:
        ValueError: If it is no number from 0 up to 1.
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f"{name} must be from 0 up to 1. Received: {name}={rate!r}")

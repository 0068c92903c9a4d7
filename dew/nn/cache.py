"""Keys and values of the tokens already read, for decoding token by token.

Entry points: `KVCache`, what a caller holds, and `LayerCache`, one layer's window on it. Rows are left-padded,
so one cursor serves them all. Nothing is mutated: each call returns the next cache, which XLA updates in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dew.arrays import Array, Bool, Float, Int
from dew.nn.sharding import constrain

CACHE_NAMES = ("layers", "activation_batch", "activation_kv", None, None)
"""Names of a bank's keys and values, [L, B, K, S, H]: heads before slots, so that decoding transposes nothing."""
SLOT_DIM = 3
"""Which dimension of a bank counts slots."""


class KVCache(struct.PyTreeNode):
    """The cache of a model.

    Attributes:
        keys: Rotated keys of each run of layers with like heads, [L, B, K, S, H].
        values: Values of each run, [L, B, K, S, H].
        index: Slot the next token is written to, int32 scalar.
        valid: Slots that hold a real token rather than padding, [B, S].
    """

    keys: tuple[Float[Array, "L B K S H"], ...]
    values: tuple[Float[Array, "L B K S H"], ...]
    index: Int[Array, ""]
    valid: Bool[Array, "B S"]

    @property
    def length(self) -> int:
        """Slots S a row has."""
        return self.valid.shape[1]

    def marked(self, tokens_valid: Bool[Array, "B T"]) -> "KVCache":
        """Mark which of the next tokens are real, leaving the cursor where it is."""
        return self.replace(valid=jax.lax.dynamic_update_slice(self.valid, tokens_valid, (0, self.index)))


def empty_cache(shapes: tuple[tuple[int, int, int], ...], batch: int, length: int, dtype: Any) -> KVCache:
    """Make a cache that holds no token.

    Args:
        shapes: Layers, key/value heads and head width of each bank.
        batch: Rows.
        length: Slots a row has: prompt and new tokens, padding included.
        dtype: Dtype of keys and values.

    Returns:
        The cache, placed by `CACHE_NAMES` when a mesh is in context.
    """

    def zeros(layers: int, heads: int, width: int) -> Array:
        return constrain(jnp.zeros((layers, batch, heads, length, width), dtype), CACHE_NAMES)

    return KVCache(
        keys=tuple(zeros(*shape) for shape in shapes),
        values=tuple(zeros(*shape) for shape in shapes),
        index=jnp.zeros((), jnp.int32),
        valid=jnp.zeros((batch, length), bool),
    )


class LayerCache(struct.PyTreeNode):
    """One layer's window on a bank of the cache.

    Attributes:
        keys: The bank's keys, [L, B, K, S, H].
        values: The bank's values.
        layer: Which layer of the bank.
        index: Slot of the first new token.
    """

    keys: Float[Array, "L B K S H"]
    values: Float[Array, "L B K S H"]
    layer: Int[Array, ""] | int
    index: Int[Array, ""]

    def append(
        self, key: Float[Array, "B T K H"], value: Float[Array, "B T K H"]
    ) -> tuple["LayerCache", Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        """Write new keys and values at the cursor.

        Args:
            key: Rotated keys of the new tokens.
            value: Their values.

        Returns:
            The window after the write, and all of the layer's keys and values, [B, K, S, H].
        """
        keys, all_keys = self._written(self.keys, key)
        values, all_values = self._written(self.values, value)
        return self.replace(keys=keys, values=values), all_keys, all_values

    def _written(self, bank: Array, new: Array) -> tuple[Array, Array]:
        """Write a block of slots; give the bank and the layer's part of it."""
        block = new.swapaxes(1, 2)[None].astype(bank.dtype)
        start = (self.layer, 0, 0, self.index, 0)
        bank = constrain(jax.lax.dynamic_update_slice(bank, block, start), CACHE_NAMES)
        return bank, bank[self.layer]

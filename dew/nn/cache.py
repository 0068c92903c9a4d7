"""What a model keeps of the tokens already read, for decoding token by token.

Entry points: `Cache`, what a caller holds; a bank for each kind of layer state, `KeyValueBank`, `LatentBank` and
`ScanBank`; one layer's window on a bank, `LayerCache`, `LayerLatents` and `LayerState`. Rows are left-padded, so one
cursor serves them all. Nothing is mutated: each call returns the next cache, which XLA updates in place.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dew.arrays import Array, Bool, Float, Int
from dew.nn.sharding import constrain

KEY_VALUE_NAMES = ("layers", "activation_batch", "activation_kv", None, None)
"""Names of a bank's keys and values, [L, B, K, S, H]: heads before slots, so that decoding transposes nothing."""
SLOT_DIM = 3
"""Which dimension of keys and values counts slots."""
LATENT_NAMES = ("layers", "activation_batch", None, None)
"""Names of a bank's latents, [L, B, S, R]: no heads to split, so every device of a tensor axis holds them all."""


class Cache(struct.PyTreeNode):
    """The cache of a model.

    Attributes:
        banks: What layers keep, one bank for all layers with like state.
        index: Slot the next token is written to, int32 scalar.
        valid: Slots that hold a real token rather than padding, [B, S].
    """

    banks: tuple["KeyValueBank | LatentBank | ScanBank", ...]
    index: Int[Array, ""]
    valid: Bool[Array, "B S"]

    @property
    def length(self) -> int:
        """Slots S a row has."""
        return self.valid.shape[1]

    def marked(self, tokens_valid: Bool[Array, "B T"]) -> "Cache":
        """Mark which of the next tokens are real, leaving the cursor where it is."""
        return self.replace(valid=jax.lax.dynamic_update_slice(self.valid, tokens_valid, (0, self.index)))

    def logical_names(self) -> Any:
        """Give the same tree with the logical names of each array in its place."""
        banks = tuple(bank.logical_names() for bank in self.banks)
        return self.replace(banks=banks, index=(), valid=("activation_batch", None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyValueShape:
    """What an attention layer keeps; layers that keep the same share a bank.

    Attributes:
        num_heads: Key/value heads K.
        head_dim: Width H of a head.
    """

    num_heads: int
    head_dim: int

    def empty(self, layers: int, batch: int, length: int, dtype: Any) -> "KeyValueBank":
        """Make a bank that holds no token; arguments as `empty_cache`'s."""
        shape = (layers, batch, self.num_heads, length, self.head_dim)
        return KeyValueBank(*(constrain(jnp.zeros(shape, dtype), KEY_VALUE_NAMES) for _ in range(2)))


class KeyValueBank(struct.PyTreeNode):
    """Keys and values of the attention layers with like heads.

    Attributes:
        keys: Rotated keys, [L, B, K, S, H].
        values: Values, [L, B, K, S, H].
    """

    keys: Float[Array, "L B K S H"]
    values: Float[Array, "L B K S H"]

    def logical_names(self) -> Any:
        """Give the same tree with logical names in place of arrays."""
        return self.replace(keys=KEY_VALUE_NAMES, values=KEY_VALUE_NAMES)

    def with_slots(self, moved: Callable[[Array, int], Array]) -> "KeyValueBank":
        """Apply a function of (array, dimension of the slots) to all that has a slot for each token."""
        return KeyValueBank(keys=moved(self.keys, SLOT_DIM), values=moved(self.values, SLOT_DIM))

    def window(self, layer: Int[Array, ""] | int, index: Int[Array, ""]) -> "LayerCache":
        """Open the window of one layer whose next token goes to slot `index`."""
        return LayerCache(self, layer, index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentShape:
    """What a layer of latent attention keeps; layers that keep the same share a bank.

    Attributes:
        rank: Width of the latent that keys and values are expanded from.
        rotary_dim: Width of the rotated key that all heads share.
    """

    rank: int
    rotary_dim: int

    def empty(self, layers: int, batch: int, length: int, dtype: Any) -> "LatentBank":
        """Make a bank that holds no token; arguments as `empty_cache`'s."""
        shape = (layers, batch, length, self.rank + self.rotary_dim)
        return LatentBank(constrain(jnp.zeros(shape, dtype), LATENT_NAMES))


class LatentBank(struct.PyTreeNode):
    """Latents of the layers with like latent attention.

    Attributes:
        latents: A token's normalised latent and, behind it, its rotated shared key, [L, B, S, R].
    """

    latents: Float[Array, "L B S R"]

    def logical_names(self) -> Any:
        """Give the same tree with logical names in place of arrays."""
        return self.replace(latents=LATENT_NAMES)

    def with_slots(self, moved: Callable[[Array, int], Array]) -> "LatentBank":
        """Apply a function of (array, dimension of the slots) to all that has a slot for each token."""
        return LatentBank(moved(self.latents, LATENT_NAMES.index(None)))

    def window(self, layer: Int[Array, ""] | int, index: Int[Array, ""]) -> "LayerLatents":
        """Open the window of one layer whose next token goes to slot `index`."""
        return LayerLatents(self, layer, index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanShape:
    """What a layer with a state keeps; layers that keep the same share a bank.

    A gated delta net's groups are its keys, and so are its heads, each with the values of all heads that share the key.

    Attributes:
        num_heads: Heads N of the scan.
        head_dim: Width H of a head.
        num_groups: Groups G that share what is written to the state and read from it.
        state_size: Width P of the state.
        reach: Tokens before its own that the convolution reads.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    reach: int

    def empty(self, layers: int, batch: int, length: int, dtype: Any) -> "ScanBank":
        """Make a bank that holds no token; arguments as `empty_cache`'s. The state is float32 whatever `dtype` is."""
        del length
        groups = (layers, batch, self.reach, self.num_groups, self.state_size)
        empty = ScanBank(
            x=jnp.zeros((layers, batch, self.reach, self.num_heads, self.head_dim), dtype),
            b=jnp.zeros(groups, dtype),
            c=jnp.zeros(groups, dtype),
            state=jnp.zeros((layers, batch, self.num_heads, self.head_dim, self.state_size), jnp.float32),
        )
        return empty.constrained()


class ScanBank(struct.PyTreeNode):
    """States of the layers with like scans, and what their convolutions read back; nothing has a slot for each token.

    Attributes:
        x: Last values before the convolution, [L, B, W - 1, N, H].
        b: Last of what is written to the state, [L, B, W - 1, G, P].
        c: Last of what is read from it, [L, B, W - 1, G, P].
        state: States, [L, B, N, H, P].
    """

    x: Float[Array, "L B _ N H"]
    b: Float[Array, "L B _ G P"]
    c: Float[Array, "L B _ G P"]
    state: Float[Array, "L B N H P"]

    def logical_names(self) -> Any:
        """Give the same tree with logical names in place of arrays."""
        groups = ("layers", "activation_batch", None, "activation_ssm_groups", None)
        return self.replace(
            x=("layers", "activation_batch", None, "activation_ssm_heads", None),
            b=groups,
            c=groups,
            state=("layers", "activation_batch", "activation_ssm_heads", None, None),
        )

    def constrained(self) -> "ScanBank":
        """Pin the arrays to the mesh in context."""
        return jax.tree.map(constrain, self, self.logical_names())

    def with_slots(self, moved: Callable[[Array, int], Array]) -> "ScanBank":
        """Give the bank itself: no part of it has slots."""
        del moved
        return self

    def window(self, layer: Int[Array, ""] | int, index: Int[Array, ""]) -> "LayerState":
        """Open the window of one layer."""
        del index
        return LayerState(self, layer)


LayerShape = KeyValueShape | LatentShape | ScanShape
"""What a layer keeps, by its kind of mixer."""


def empty_cache(kinds: tuple[tuple[LayerShape, int], ...], batch: int, length: int, dtype: Any) -> Cache:
    """Make a cache that holds no token.

    Args:
        kinds: For each bank what its layers keep, and how many layers it has.
        batch: Rows.
        length: Slots a row has: prompt and new tokens, padding included.
        dtype: Dtype of keys, values and latents.

    Returns:
        The cache, placed by its logical names when a mesh is in context.
    """
    return Cache(
        banks=tuple(kind.empty(layers, batch, length, dtype) for kind, layers in kinds),
        index=jnp.zeros((), jnp.int32),
        valid=jnp.zeros((batch, length), bool),
    )


class LayerCache(struct.PyTreeNode):
    """One attention layer's window on its bank.

    Attributes:
        bank: The bank.
        layer: Which layer of the bank.
        index: Slot of the first new token.
    """

    bank: KeyValueBank
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
        keys, all_keys = self._written(self.bank.keys, key)
        values, all_values = self._written(self.bank.values, value)
        return self.replace(bank=KeyValueBank(keys=keys, values=values)), all_keys, all_values

    def _written(self, stored: Array, new: Array) -> tuple[Array, Array]:
        """Write a block of slots; give the bank's array and the layer's part of it."""
        block = new.swapaxes(1, 2)[None].astype(stored.dtype)
        start = (self.layer, 0, 0, self.index, 0)
        stored = constrain(jax.lax.dynamic_update_slice(stored, block, start), KEY_VALUE_NAMES)
        return stored, stored[self.layer]


class LayerLatents(struct.PyTreeNode):
    """One latent attention layer's window on its bank.

    Attributes:
        bank: The bank.
        layer: Which layer of the bank.
        index: Slot of the first new token.
    """

    bank: LatentBank
    layer: Int[Array, ""] | int
    index: Int[Array, ""]

    def append(self, latents: Float[Array, "B T R"]) -> tuple["LayerLatents", Float[Array, "B S R"]]:
        """Write what new tokens leave behind at the cursor.

        Args:
            latents: Their latents and shared keys.

        Returns:
            The window after the write, and those of all of the layer's slots.
        """
        block, start = latents[None].astype(self.bank.latents.dtype), (self.layer, 0, self.index, 0)
        stored = constrain(jax.lax.dynamic_update_slice(self.bank.latents, block, start), LATENT_NAMES)
        return self.replace(bank=LatentBank(stored)), stored[self.layer]


class LayerState(struct.PyTreeNode):
    """One scanning layer's window on its bank.

    Attributes:
        bank: The bank.
        layer: Which layer of the bank.
    """

    bank: ScanBank
    layer: Int[Array, ""] | int

    def read(self) -> ScanBank:
        """Give the layer's own part, without the dimension of layers."""
        return jax.tree.map(lambda stored: stored[self.layer], self.bank)

    def written(self, part: ScanBank) -> "LayerState":
        """Give the window with another part in the layer's place."""

        def write(stored: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(stored, new.astype(stored.dtype), self.layer, 0)

        return self.replace(bank=jax.tree.map(write, self.bank, part).constrained())

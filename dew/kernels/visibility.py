"""Which keys a query reads, as a few small vectors instead of a [T, S] mask.

Entry points: `Visibility`, and `consecutive_visibility` for queries and keys that lie in slots one after another.
"""

import jax.numpy as jnp
from flax import struct

from dew.arrays import Array, Bool, Int


@struct.dataclass
class Visibility:
    """Which keys each query may read: not later than itself, within a window or chunk, and of the same segment.

    Slots may be arbitrary: queries of several stretches of a sequence, keys of a part of it. What a shortcut or a
    compiled kernel needs to know of them when it is traced is in the static fields.

    Attributes:
        query_slots: Place of each query in the sequence, [B or 1, T].
        key_slots: Place of each key in the same sequence, [B or 1, S].
        query_segments: Document number of each query, [B or 1, T]; None when all are one document.
        key_segments: Document number of each key, [B or 1, S]; a query reads its own number only.
        window: How many slots a query reads, its own included; None means all before it.
        chunk: Length of the blocks of slots a query reads its own of (slot // chunk is equal, as in Llama 4); None
            means all.
        consecutive: Whether query t lies in slot `query_slots[b, 0] + t` and key s in slot `key_slots[b, 0] + s`, the
            same in all rows. The distance of the first two may be known only when the program runs.
        offset: `query_slots[b, 0] - key_slots[b, 0]` where that is known when the program is traced; it says
            `consecutive` too. None where it is not.
        key_start: `key_slots[b, 0]` where that is known when the program is traced.
    """

    query_slots: Int[Array, "#B T"]
    key_slots: Int[Array, "#B S"]
    query_segments: Int[Array, "#B T"] | None = None
    key_segments: Int[Array, "#B S"] | None = None
    window: int | None = struct.field(pytree_node=False, default=None)
    chunk: int | None = struct.field(pytree_node=False, default=None)
    consecutive: bool = struct.field(pytree_node=False, default=False)
    offset: int | None = struct.field(pytree_node=False, default=None)
    key_start: int | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        if self.offset is not None and not self.consecutive:
            raise ValueError(
                f"an offset says that slots are consecutive. Pass consecutive=True too. Received: offset={self.offset}"
            )

    def mask(self) -> Bool[Array, "#B T S"]:
        """Mark every (query, key) pair that is visible; the row dimension is 1 when all rows agree."""
        query_slots, key_slots = self.query_slots[:, :, None], self.key_slots[:, None, :]
        visible = key_slots <= query_slots
        if self.window is not None:
            visible &= key_slots > query_slots - self.window
        if self.chunk is not None:
            visible &= key_slots // self.chunk == query_slots // self.chunk
        if self.query_segments is not None and self.key_segments is not None:
            visible &= self.key_segments[:, None, :] == self.query_segments[:, :, None]
        return visible


def consecutive_visibility(
    num_queries: int,
    num_keys: int,
    *,
    query_start: int | Int[Array, ""] = 0,
    key_start: int | Int[Array, ""] = 0,
    query_segments: Int[Array, "#B T"] | None = None,
    key_segments: Int[Array, "#B S"] | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> Visibility:
    """Describe queries and keys that each lie in slots one after another, in causal order.

    Kernels learn the distance of the two in place of a mask: when the program is traced where both starts are Python
    integers, when it runs where one of them is an array.

    Args:
        num_queries: Queries T.
        num_keys: Keys S.
        query_start: Slot of the first query.
        key_start: Slot of the first key.
        query_segments: Document number of each query; None when all are one document.
        key_segments: Document number of each key.
        window: How many slots a query reads, its own included; None means all before it.
        chunk: Length of the blocks of slots a query reads its own of; None means all.

    Returns:
        The visibility of T queries and S keys.
    """
    offset = query_start - key_start if isinstance(query_start, int) and isinstance(key_start, int) else None
    return Visibility(
        query_slots=query_start + jnp.arange(num_queries, dtype=jnp.int32)[None],
        key_slots=key_start + jnp.arange(num_keys, dtype=jnp.int32)[None],
        query_segments=query_segments,
        key_segments=key_segments,
        window=window,
        chunk=chunk,
        consecutive=True,
        offset=offset,
        key_start=key_start if isinstance(key_start, int) else None,
    )

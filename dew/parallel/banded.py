"""Attention that reads a little way back: each device needs the end of the slice before its own, and nothing else.

Entry points: `banded_attention`, `banded_reach`, `banded_transfers`. With r keys of the slice before: permutes of 2 r
keys, the same backward; chunks that end with the slices send nothing.
"""

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.parallel.attention_shard import AttentionShard
from dew.parallel.traffic import AttentionSizes, Transfer


def banded_attention(shard: AttentionShard) -> Float[Array, "B t N H"]:
    """Attend from this device's queries to its own keys and the last ones of the device before.

    That is t (t + r) pairs of a query and a key for slices of t, 12 H operations each, forward and backward.

    Args:
        shard: This device's part, whose window or chunk `banded_reach` lets into one slice.

    Returns:
        The mixed values of this device's positions.
    """
    call, length = shard.call, shard.slice_length
    reach = banded_reach(length, call.shards, call.window, call.chunk)
    assert reach is not None, "only a window or chunks make a band"
    key, value = (_extended(x, reach, call.axis, call.shards) for x in (shard.key, shard.value))
    start = call.index() * length
    segments = shard.segments
    if reach:
        # The first device has nothing before its slice: what stands there is of no document.
        segments = jnp.ones((1, length * call.shards), jnp.int32) if segments is None else segments
        segments = jnp.pad(segments, ((0, 0), (reach, 0)), constant_values=-1)
    both = _cut(segments, start + reach, length), _cut(segments, start, reach + length)
    # Masks of dropout follow from places in the row.
    is_anywhere = shard.dropout is None and is_alike(reach, call.chunk)
    starts = (reach, 0) if is_anywhere else (start, start - reach)
    return call.attend(shard.query, key, value, both, shard.sinks, shard.dropout, starts=starts)


def is_alike(reach: int, chunk: int | None) -> bool:
    """Say whether a slice with what it reads before it is the same call wherever it lies in the row.

    Chunks are cut from the start of the row; where they do not end with the slices, each slice cuts its own in other
    places. A call that is alike has starts that kernels know when they are traced.

    Args:
        reach: What `banded_reach` counts.
        chunk: Length of the chunks; None means none.
    """
    return reach == 0 or chunk is None


def banded_reach(slice_length: int, shards: int, window: int | None, chunk: int | None) -> int | None:
    """Count how many positions before its slice a device reads at most.

    Args:
        slice_length: Positions of a slice.
        shards: Devices.
        window: How many tokens a token reads, itself included.
        chunk: Length of the blocks it reads its own of; a slice may begin inside one.

    Returns:
        The number; None when nothing limits it.
    """
    reaches = [] if window is None else [window - 1]
    if chunk is not None:
        reaches.append(max(device * slice_length % chunk for device in range(shards)))
    return min(reaches, default=None)


def banded_transfers(sizes: AttentionSizes) -> tuple[Transfer, ...]:
    """List what the exchange sends.

    Args:
        sizes: The call.
    """
    reach = banded_reach(sizes.slice_length, sizes.shards, sizes.window, sizes.chunk)
    assert reach is not None, "only a window or chunks make a band"
    size = 2 * reach * (sizes.key_bytes // sizes.slice_length)
    return tuple(
        Transfer(kind="collective-permute", result_bytes=size, shards=sizes.shards, in_backward=backward)
        for backward in (False, True)
        if size
    )


def _extended(x: Array, reach: int, axis: str, shards: int) -> Array:
    """Put the last positions of the device before in front of a slice; the first device gets zeros."""
    if reach == 0:
        return x
    halo = jax.lax.ppermute(x[:, -reach:], axis, [(device, device + 1) for device in range(shards - 1)])
    return jnp.concatenate([halo, x], axis=1)


def _cut(segments: Array | None, start: Array, length: int) -> Array | None:
    return None if segments is None else jax.lax.dynamic_slice_in_dim(segments, start, length, 1)

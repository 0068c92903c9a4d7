"""Causal work in equal parts: of 2 N chunks, device i takes chunk i and chunk 2 N - 1 - i.

Entry points: `to_stripes`, `from_stripes`. A chunk late in the sequence reads more keys than an early one; the pairs
read the same number. Each direction is two permutes of half a slice.
"""

import jax
import jax.numpy as jnp

from dew.arrays import Array


def to_stripes(x: Array, axis: str, shards: int) -> tuple[Array, Array]:
    """Exchange halves of slices so that each device holds an early and a late chunk.

    Args:
        x: This device's slice, [B, t, ...], t even.
        axis: Mesh axis of the slices.
        shards: Its size N.

    Returns:
        Chunk i and chunk 2 N - 1 - i of 2 N on device i, each [B, t / 2, ...].
    """
    half = x.shape[1] // 2
    even, odd = (
        jax.lax.ppermute(part, axis, [(device, stripe_owner(2 * device + offset, shards)) for device in range(shards)])
        for offset, part in enumerate((x[:, :half], x[:, half:]))
    )
    # 2 N - 1 - i is odd where i is even.
    is_even = jax.lax.axis_index(axis) % 2 == 0
    return jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)


def from_stripes(early: Array, late: Array, axis: str, shards: int) -> Array:
    """Undo `to_stripes`.

    Args:
        early: Chunk i on device i.
        late: Chunk 2 N - 1 - i.
        axis: Mesh axis of the slices.
        shards: Its size N.

    Returns:
        This device's slice, [B, t, ...].
    """
    is_even = jax.lax.axis_index(axis) % 2 == 0
    even, odd = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
    halves = [
        jax.lax.ppermute(half, axis, [(stripe_owner(2 * device + offset, shards), device) for device in range(shards)])
        for offset, half in enumerate((even, odd))
    ]
    return jnp.concatenate(halves, axis=1)


def stripe_starts(index: Array, slice_length: int, shards: int) -> tuple[Array, Array]:
    """Give the positions at which a device's two chunks begin.

    Args:
        index: Number of the device.
        slice_length: Positions of a slice.
        shards: Devices.
    """
    half = slice_length // 2
    return index * half, (2 * shards - 1 - index) * half


def stripe_bytes(slice_bytes: int, shards: int) -> int:
    """Count the bytes of the permutes of one direction; of two devices each keeps its first half.

    Args:
        slice_bytes: Bytes of a slice.
        shards: Devices.
    """
    return slice_bytes if shards > 2 else slice_bytes // 2


def stripe_owner(chunk: int, shards: int) -> int:
    """Say which device computes a chunk of the 2 N.

    Args:
        chunk: Number of the chunk.
        shards: Devices N.
    """
    return min(chunk, 2 * shards - 1 - chunk)

"""Bytes on a device: of one shard, of a placed tree, of everything alive.

Entry points: `shard_bytes`, `bytes_per_device`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from dew.arrays import PyTree

__all__ = ["bytes_per_device", "format_bytes", "live_bytes_per_device", "shard_bytes"]


def shard_bytes(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> int:
    """Count the bytes one device holds of an array.

    Args:
        shape: Global shape.
        dtype: Element type.
        sharding: Any JAX sharding; None means the whole array.

    Returns:
        Bytes per device.
    """
    local = tuple(shape) if sharding is None else sharding.shard_shape(tuple(shape))
    return math.prod(local) * itemsize(dtype)


def itemsize(dtype: Any) -> int:
    """Bytes of one element; an extended dtype such as a PRNG key counts its raw words."""
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        return int(getattr(dtype, "itemsize", 4))


def bytes_per_device(tree: PyTree, shardings: PyTree | None = None) -> int:
    """Count the bytes one device holds of a tree.

    Args:
        tree: Arrays, or anything with `shape` and `dtype`.
        shardings: Tree of shardings of the same structure; None takes each leaf's own `sharding`, whole without one.

    Returns:
        Bytes per device.
    """
    leaves = jax.tree.leaves(tree)
    if shardings is None:
        places = [getattr(leaf, "sharding", None) for leaf in leaves]
    else:
        places = jax.tree.leaves(shardings)
        if len(places) != len(leaves):
            raise ValueError(f"The tree has {len(leaves)} leaves but {len(places)} shardings: give one per leaf.")
    return sum(shard_bytes(leaf.shape, leaf.dtype, place) for leaf, place in zip(leaves, places, strict=True))


def live_bytes_per_device() -> dict[Any, int]:
    """Count the bytes of every live JAX array on each addressable device.

    Returns:
        Device to bytes. A buffer that several arrays share counts once: views, and the single-device arrays that JAX
        makes of an array's shards when it is read or moved.
    """
    buffers: dict[tuple[Any, int], int] = {}
    for array in jax.live_arrays():
        size = shard_bytes(array.shape, array.dtype, array.sharding)
        for shard in array.addressable_shards:
            try:
                buffers[shard.device, shard.data.unsafe_buffer_pointer()] = size
            except jax.errors.JaxRuntimeError:
                continue  # a view of a buffer that was donated by another name counts as alive, and holds nothing
    totals: dict[Any, int] = {}
    for (device, _), size in buffers.items():
        totals[device] = totals.get(device, 0) + size
    return totals


def format_bytes(count: float) -> str:
    """Write a byte count for people, in decimal units.

    Args:
        count: Bytes.

    Returns:
        For example `1.23 GB`.
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"

"""The pool of processes that run one program: joining it, whole values on every host, and writing files once.

Entry points: `initialize`, before any array exists; `host_value`, `host_pieces`, `write_once`. This file and the
command line are the engine's only readers of the environment.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["host_pieces", "host_value", "initialize", "is_primary", "write_once"]

PIECE_BYTES = 4 * 2**20
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "DEW_PROCESS_COUNT", "DEW_PROCESS_ID")


def initialize() -> bool:
    """Join the pool that the environment describes, or do nothing outside one.

    Returns:
        True when this process joined, or had joined, a pool.

    Raises:
        ValueError: If the environment describes a pool in part, or with numbers that do not fit.
    """
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if "DEW_PROCESS_COUNT" not in given and "DEW_PROCESS_ID" not in given:
        return False
    missing = [name for name in _VARIABLES if name not in given]
    if missing:
        raise ValueError(f"The environment sets {sorted(given)} but not {missing}; a process pool needs all three.")
    address = given["JAX_COORDINATOR_ADDRESS"]
    count, index = _integer("DEW_PROCESS_COUNT", given), _integer("DEW_PROCESS_ID", given)
    if count < 1 or not 0 <= index < count:
        raise ValueError(
            "A process pool needs DEW_PROCESS_COUNT >= 1 and 0 <= DEW_PROCESS_ID < DEW_PROCESS_COUNT. "
            f"Received: DEW_PROCESS_COUNT={count}, DEW_PROCESS_ID={index}"
        )
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(coordinator_address=address, num_processes=count, process_id=index)
    return True


def _integer(name: str, given: dict[str, str]) -> int:
    try:
        return int(given[name])
    except ValueError as error:
        raise ValueError(f"{name} must be an integer. Received: {given[name]!r}") from error


def is_primary() -> bool:
    """Say whether this process is the one that prints and commits: process 0."""
    return jax.process_index() == 0


def host_value(leaf: Any) -> np.ndarray:
    """Copy a whole array to this host; where it spans processes, all of them must call this together.

    Args:
        leaf: An array on any mesh, or a host array.
    """
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_replicated:
        # An array keeps the host value that it was asked for as long as it lives; that of a copy goes with it.
        leaf = jnp.copy(leaf)
    return np.asarray(leaf)


def host_pieces(leaf: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Copy an array, or one entry of it, to this host in pieces of `PIECE_BYTES`, or of one row where rows are larger.

    Where the array spans processes, all of them must call this together.

    Args:
        leaf: An array on any mesh, or a host array.
        place: Which entry, by its numbers in the leading dimensions; what is copied has one dimension or more.

    Yields:
        Where a piece lies in what is copied, and its values.
    """
    if not isinstance(leaf, jax.Array):
        yield (slice(None),), np.asarray(leaf)[place]
        return
    if place:
        leaf = _entry(leaf, place)
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        assert isinstance(leaf.sharding, NamedSharding), "what spans processes lies on a mesh"
        leaf = jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec()))
    for index, part in {str(shard.index): (shard.index, shard.data) for shard in leaf.addressable_shards}.values():
        first, count = index[0].start or 0, len(part)
        step = max(1, PIECE_BYTES * count // part.nbytes)
        for start in range(0, count, step):
            stop = min(start + step, count)
            # As in `host_value`: of an array of its own, so that the leaf keeps no host value.
            yield (slice(first + start, first + stop), *index[1:]), np.asarray(_rows(part, start, stop - start))


@functools.partial(jax.jit, static_argnums=2)
def _rows(part: jax.Array, start: int, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(part, start, count)


def _entry(leaf: jax.Array, place: tuple[int, ...]) -> jax.Array:
    """Take one entry. Plain indexing gathers the entries of all devices first where a leading dimension is split."""
    spec = tuple(leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else ()
    spec += (None,) * (leaf.ndim - len(spec))
    if not any(spec[: len(place)]):
        return _indexed(leaf, place)
    assert isinstance(leaf.sharding, NamedSharding), "what is split lies on a mesh"
    return _indexed_where_held(leaf.sharding.mesh, spec, len(place))(leaf, np.asarray(place, np.int32))


@jax.jit
def _indexed(leaf: jax.Array, place: tuple[int, ...]) -> jax.Array:
    for number in place:
        leaf = jax.lax.dynamic_index_in_dim(leaf, number, axis=0, keepdims=False)
    return leaf


@functools.cache
def _indexed_where_held(mesh: Mesh, spec: tuple[Any, ...], count: int) -> Callable[[jax.Array, Any], jax.Array]:
    """Compile an entry's way from the devices that hold it to those that hold the same part of other entries."""
    leading = spec[:count]
    axes = [axis for each in leading if each for axis in (each if isinstance(each, tuple) else (each,))]

    def local(part: jax.Array, place: jax.Array) -> jax.Array:
        starts = [
            jax.lax.axis_index(each) * size if each else 0 for each, size in zip(leading, part.shape, strict=False)
        ]
        own = place - jnp.stack(starts)
        sizes = np.array(part.shape[:count])
        entry = _indexed(part, tuple(jnp.clip(own, 0, sizes - 1)))
        # Bits, of which one device has those that are not 0: a sum of numbers would lose the sign of a zero.
        bits = jax.lax.bitcast_convert_type(entry, f"uint{8 * entry.dtype.itemsize}")
        bits = jax.lax.psum(jnp.where(jnp.all((own >= 0) & (own < sizes)), bits, 0), tuple(axes))
        return jax.lax.bitcast_convert_type(bits, entry.dtype)

    specs = (PartitionSpec(*spec), PartitionSpec())
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(*spec[count:])))


def write_once(write: Callable[[Iterator[Any]], None], items: Iterator[Any]) -> None:
    """Let process 0 write what all processes compute together, and return when it is written.

    Args:
        write: Consumes the items; called in process 0 only.
        items: Gathers values as it goes, so every process consumes it to the end.

    Raises:
        Exception: What `write` raised, in process 0.
        OSError: In the other processes, when process 0 could not write.
    """
    if jax.process_count() == 1:
        write(items)
        return
    failure: Exception | None = None
    if is_primary():
        try:
            write(items)
        except Exception as error:  # the others wait for the rest of the gathers, whatever went wrong
            failure = error
    collections.deque(items, maxlen=0)  # which holds no item while the next is gathered
    failed = bool(multihost_utils.broadcast_one_to_all(np.asarray(failure is not None)))
    if failure is not None:
        raise failure
    if failed:
        raise OSError("Process 0 could not write what all processes save together; its own error says why.")

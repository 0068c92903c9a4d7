"""Which rows of a global batch a process reads, and how its share becomes global arrays.

Entry points: `data_partition`, `shard_batch`. A loader cuts its records `index::count`, so global batch k holds the
same records at every process count.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dew.arrays import PyTree
from dew.placement.layout import LayoutRefused
from dew.placement.mesh import AXES, BATCH_AXES, batch_divisor
from dew.tree import path_name

__all__ = ["DataPartition", "WholeBatch", "batch_sharding", "data_partition", "shard_batch"]


@dataclasses.dataclass(frozen=True)
class DataPartition:
    """One share of every global batch.

    Attributes:
        index: Which share, from 0.
        count: How many shares there are.
        readers: How many processes read this share, because their devices hold the same rows.

    Raises:
        ValueError: If the index is not in `[0, count)` or a count is not positive.
    """

    index: int = 0
    count: int = 1
    readers: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or self.readers < 1 or not 0 <= self.index < self.count:
            raise ValueError(
                "DataPartition needs count >= 1, readers >= 1 and 0 <= index < count. "
                f"Received: index={self.index}, count={self.count}, readers={self.readers}"
            )


class WholeBatch(dict):
    """A host batch that every device is to hold whole, for rows that do not divide; every process gives all of them."""


def data_partition(mesh: Mesh) -> DataPartition:
    """Say which share of every global batch this process reads.

    Args:
        mesh: A mesh with the six axes.

    Returns:
        The share; processes whose devices hold the same rows read the same one.

    Raises:
        LayoutRefused: If two processes hold row shards that overlap without being equal.
        ValueError: If this process has no device in the mesh.
    """
    rows = _row_shards(mesh)
    process = jax.process_index()
    if process not in rows:
        raise ValueError(
            f"Process {process} has no device in the mesh, whose devices belong to processes {sorted(rows)}. "
            "Build the mesh from the devices of every process."
        )
    groups = sorted({tuple(sorted(shards)) for shards in rows.values()})
    seen = [shard for group in groups for shard in group]
    if len(seen) != len(set(seen)) or len({len(group) for group in groups}) > 1:
        raise LayoutRefused(
            f"Processes hold row shards {groups}, which overlap or differ in number: no process can read whole shares. "
            "Use axis sizes that keep data, expert and fsdp aligned with the processes."
        )
    mine = tuple(sorted(rows[process]))
    readers = sum(tuple(sorted(shards)) == mine for shards in rows.values())
    return DataPartition(index=groups.index(mine), count=len(groups), readers=readers)


def _row_shards(mesh: Mesh) -> dict[int, set[int]]:
    """Map each process to the indices of the row shards its devices hold."""
    rows: dict[int, set[int]] = {}
    sizes = [mesh.shape[axis] for axis in BATCH_AXES]
    dims = [mesh.axis_names.index(axis) for axis in BATCH_AXES]
    assert tuple(mesh.axis_names) == AXES, f"mesh axes are {mesh.axis_names}, expected {AXES}"
    for position in np.ndindex(mesh.devices.shape):
        shard = int(np.ravel_multi_index([position[dim] for dim in dims], sizes))
        device: Any = mesh.devices[position]
        rows.setdefault(device.process_index, set()).add(shard)
    return rows


@functools.lru_cache(maxsize=64)
def batch_sharding(mesh: Mesh, shape: tuple[int, ...] = (), *, leading: int = 0) -> NamedSharding:
    """The sharding of a batch array: rows over data, expert and fsdp, positions over sequence.

    Arrays [rows, positions] and [rows, positions, width] count as sequences where their positions divide by the axis;
    images, videos and everything else keep all dimensions but the rows whole.

    Args:
        mesh: A mesh with the six axes.
        shape: The array's shape; without it only the rows are split.
        leading: Dimensions before the rows.
    """
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)
    rows = axes[0] if len(axes) == 1 else axes or None
    shards = mesh.shape["sequence"]
    splits = shards > 1 and len(shape) - leading in (2, 3) and shape[leading + 1] % shards == 0
    entries = [*[None] * leading, rows, "sequence"] if splits else [*[None] * leading, rows] if rows else []
    return NamedSharding(mesh, PartitionSpec(*entries))


def shard_batch(mesh: Mesh, host_batch: PyTree, *, is_stacked: bool = False, microbatches: int = 1) -> PyTree:
    """Assemble this process's share of a batch into global arrays.

    Args:
        mesh: A mesh with the six axes.
        host_batch: Tree of host arrays `[rows of this share, ...]`; a scalar is replicated. The arrays are copied, so
            the caller may reuse its buffers. A `WholeBatch` is not split: every device gets all of its rows.
        is_stacked: Whether the arrays are several batches, `[batches, rows of this share, ...]`; a vector `[batches]`
            is then replicated.
        microbatches: Microbatches that a pipeline cuts each device's rows into.

    Returns:
        The tree of global arrays, placed by `batch_sharding`.

    Raises:
        ValueError: If the global rows do not divide over the row shards, or a shard's rows into the microbatches,
            naming batch sizes that do.
    """
    is_alone, is_whole = jax.process_count() == 1, isinstance(host_batch, WholeBatch)
    structure, arrays, places = _copied(mesh, host_batch, is_stacked, microbatches)
    if mesh.size == 1:
        # The arguments of a compiled function take a shorter way to the device than device_put.
        return jax.tree.unflatten(structure, _on_one_device(places[0])(arrays) if arrays else [])
    if is_alone:
        return jax.tree.unflatten(structure, jax.device_put(arrays, places))
    lead, count = int(is_stacked), 1 if is_whole else data_partition(mesh).count

    def assemble(local: np.ndarray, place: NamedSharding) -> jax.Array:
        shape = list(local.shape)
        if local.ndim > lead:
            shape[lead] *= count
        return jax.make_array_from_process_local_data(place, local, tuple(shape))

    return jax.tree.unflatten(structure, [assemble(*pair) for pair in zip(arrays, places, strict=True)])


def batch_argument(mesh: Mesh, host_batch: PyTree, *, microbatches: int = 1) -> PyTree:
    """Give what a compiled function takes for a batch: as `shard_batch`, but host arrays where there is one device.

    A small step is mostly what it takes to hand its batch over, and arguments need no program of their own.

    Args:
        mesh: As `shard_batch`.
        host_batch: As `shard_batch`.
        microbatches: As `shard_batch`.
    """
    if mesh.size > 1:
        return shard_batch(mesh, host_batch, microbatches=microbatches)
    structure, arrays, _ = _copied(mesh, host_batch, False, microbatches)
    return jax.tree.unflatten(structure, arrays)


def _copied(mesh: Mesh, host_batch: PyTree, is_stacked: bool, microbatches: int) -> tuple[Any, list, list]:
    """Copy a batch, flat, with the place of each array; refuse rows that do not divide."""
    lead, is_whole = int(is_stacked), isinstance(host_batch, WholeBatch)
    divisor, count = batch_divisor(mesh), 1 if jax.process_count() == 1 or is_whole else data_partition(mesh).count
    arrays, places = [], []
    flat, structure = jax.tree_util.tree_flatten_with_path(dict(host_batch) if is_whole else host_batch)
    for path, leaf in flat:
        # JAX aliases aligned host buffers on CPU, so a loader that refills its buffer would change the batch in flight.
        local = np.array(leaf, copy=True)
        has_rows = local.ndim > lead and not is_whole
        if has_rows:
            _check_rows(mesh, path, local.shape[lead] * count, divisor, microbatches)
        arrays.append(local)
        places.append(
            batch_sharding(mesh, local.shape, leading=lead) if has_rows else NamedSharding(mesh, PartitionSpec())
        )
    return structure, arrays, places


@functools.lru_cache(maxsize=8)
def _on_one_device(place: NamedSharding) -> Any:
    return jax.jit(lambda arrays: arrays, out_shardings=place)


def _check_rows(mesh: Mesh, path: Any, rows: int, shards: int, microbatches: int) -> None:
    divisor = shards * microbatches
    if rows % divisor == 0 and rows:
        return
    below = rows // divisor * divisor
    works = [str(size) for size in (below, below + divisor) if size]
    axes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in BATCH_AXES)
    if rows % shards == 0 and rows:
        raise ValueError(
            f"Batch {path_name(path) or 'array'!r} has {rows // shards} rows on each of the {shards} row shards of the "
            f"mesh ({axes}), which do not divide into microbatches={microbatches} of the pipeline "
            f"(stage={mesh.shape['stage']}). Use a batch of {' or '.join(works)} rows, or other microbatches."
        )
    raise ValueError(
        f"Batch {path_name(path) or 'array'!r} has {rows} global rows, which do not divide over the {shards} row "
        f"shards of the mesh ({axes}). Use a batch of {' or '.join(works)} rows."
    )

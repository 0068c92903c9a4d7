"""Stream tensors of a checkpoint into sharded arrays, holding a bounded number of buffers beyond what is placed.

Entry points: `place`, `planned_reads`. Each device's part is filled layer by layer from the mapped file, transposed in
tiles by a few threads; pages of a tensor are given back when all parts have read it. Reading runs ahead of the copies
to devices.
"""

import collections
import concurrent.futures
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dew.nn.router import is_balance_bias
from dew.pretrained.recipe import Recipe
from dew.pretrained.source import TensorSource

ALIGNMENT = 64
"""Bytes. The CPU backend takes such a host buffer over as it is; any other is copied, and the heap keeps the space."""
PIECE_BYTES = 4 * 2**20
STAGING_BYTES = 256 * 2**20
TRANSFER_BYTES = 512 * 2**20
"""Most bytes on their way to devices while the next ones are read, unless one leaf's part is larger."""
MAX_THREADS = 8
# Rows of the file transposed at once: their cache lines stay in the first-level cache also when rows are a power of two
# apart. Measured on 2048 x 4096: 16 rows 1.7 GB/s per thread, 256 x 256 tiles 0.7, untiled 0.1.
TILE_ROWS = 16
TILE_COLUMNS = 4096

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes placed so far and in all, from the thread that loads."""


class _Part(NamedTuple):
    """The part of a leaf that some devices hold: where it lies in the leaf, on which devices."""

    index: tuple[slice, ...]  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    devices: list[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.stop - axis.start for axis in self.index)


def place(
    recipes: Iterable[Recipe],
    shardings: Mapping[str, jax.sharding.Sharding],
    source: TensorSource,
    dtype: Any = None,
    *,
    progress: ProgressCallback | None = None,
) -> dict[str, jax.Array]:
    """Load every leaf onto its devices.

    Call `recipe.check_coverage` first: shapes and names are taken as checked.

    Args:
        recipes: One per leaf.
        shardings: Sharding of each leaf, by path.
        source: The checkpoint.
        dtype: Storage dtype of floating-point leaves; None keeps what the file holds.
        progress: Told the bytes placed after each leaf.

    Returns:
        Path to array, in the order of the recipes.
    """
    todo = list(recipes)
    dtypes = {recipe.path: leaf_dtype(recipe, source, dtype) for recipe in todo}
    total = sum(math.prod(recipe.shape) * dtypes[recipe.path].itemsize for recipe in todo)
    done, arrays = 0, {}
    transfers = _Transfers()
    with concurrent.futures.ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "dew-load") as pool:
        for recipe in todo:
            arrays[recipe.path] = _place_leaf(
                recipe, shardings[recipe.path], source, dtypes[recipe.path], pool, transfers
            )
            done += math.prod(recipe.shape) * dtypes[recipe.path].itemsize
            if progress is not None:
                progress(done, total)
    transfers.finish()
    return arrays


def leaf_dtype(recipe: Recipe, source: TensorSource, dtype: Any) -> np.dtype:
    """Dtype a leaf is stored in: `dtype`, or that of its tensors in the file; where they differ, float32 holds all.

    Balance biases are float32 always.
    """
    if is_balance_bias(recipe.path):
        return np.dtype(np.float32)
    if dtype is not None:
        return np.dtype(dtype)
    stored = {source.info(name).dtype for name in recipe.sources}
    widest = stored.pop() if len(stored) == 1 else np.dtype(np.float32)
    return np.dtype(np.float32) if widest == np.float64 and not jax.config.read("jax_enable_x64") else widest


def _place_leaf(
    recipe: Recipe,
    sharding: jax.sharding.Sharding,
    source: TensorSource,
    dtype: np.dtype,
    pool: concurrent.futures.Executor,
    transfers: "_Transfers",
) -> jax.Array:
    placed: dict[Any, jax.Array] = {}
    for parts in _groups(_parts(recipe.shape, sharding), dtype.itemsize):
        buffers = [aligned(part.shape, dtype) for part in parts]
        _fill(recipe, parts, buffers, source, pool)
        group: dict[Any, jax.Array] = {}
        for part, buffer in zip(parts, buffers, strict=True):
            group |= {device: jax.device_put(buffer, device) for device in part.devices}
        if next(iter(group)).platform != "cpu":  # there the buffer becomes the array
            transfers.add(list(group.values()), sum(buffer.nbytes for buffer in buffers))
        placed |= group
    return jax.make_array_from_single_device_arrays(recipe.shape, sharding, list(placed.values()))


class _Transfers:
    """Copies under way to devices. Their host buffers are free only when they are done, so few may be under way."""

    def __init__(self) -> None:
        self._groups: collections.deque[tuple[list[jax.Array], int]] = collections.deque()
        self.nbytes = 0

    def add(self, arrays: list[jax.Array], nbytes: int) -> None:
        """Remember copies from buffers of `nbytes`, after waiting for the oldest while there are too many."""
        while self._groups and self.nbytes + nbytes > TRANSFER_BYTES:
            self._finish_oldest()
        self._groups.append((arrays, nbytes))
        self.nbytes += nbytes

    def finish(self) -> None:
        """Wait for all."""
        while self._groups:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        arrays, nbytes = self._groups.popleft()
        jax.block_until_ready(arrays)
        self.nbytes -= nbytes


def _parts(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> list[_Part]:
    """Distinct parts this process holds: devices with the same part share one read."""
    parts: dict[tuple[tuple[int, int], ...], _Part] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
        slices = tuple(slice(*pair) for pair in bounds)
        parts.setdefault(bounds, _Part(slices, [])).devices.append(device)
    return list(parts.values())


def _groups(parts: Sequence[_Part], itemsize: int) -> Iterator[list[_Part]]:
    """Parts to fill in one pass over the file.

    On the CPU backend a filled buffer becomes the array, so all parts are filled in one pass. Elsewhere it is a copy on
    the way to the device, so a pass takes what fits into `STAGING_BYTES`, at least one part.
    """
    group: list[_Part] = []
    group_bytes = 0
    for part in parts:
        nbytes = math.prod(part.shape) * itemsize
        if group and part.devices[0].platform != "cpu" and group_bytes + nbytes > STAGING_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(part)
        group_bytes += nbytes
    yield group


def _fill(
    recipe: Recipe,
    parts: Sequence[_Part],
    buffers: Sequence[np.ndarray],
    source: TensorSource,
    pool: concurrent.futures.Executor,
) -> None:
    """Fill the buffers, one source tensor after the other, a bounded number of pieces ahead."""
    pending: collections.deque[tuple[concurrent.futures.Future, str | None]] = collections.deque()

    def finish_oldest() -> None:
        future, finished_tensor = pending.popleft()
        future.result()
        if finished_tensor is not None:
            source.release(finished_tensor)

    try:
        for layer, name in enumerate(recipe.sources):
            pieces = list(_pieces(recipe, layer, parts, buffers, source.info(name).dtype.itemsize))
            for number, (covering, inner, target) in enumerate(pieces):
                future = pool.submit(_copy_piece, source, name, recipe, covering, inner, target)
                pending.append((future, name if number == len(pieces) - 1 else None))
                if len(pending) > 2 * MAX_THREADS:
                    finish_oldest()
        while pending:
            finish_oldest()
    finally:
        for future, _ in pending:
            future.cancel()


def planned_reads(
    recipe: Recipe, sharding: jax.sharding.Sharding, source: TensorSource
) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Say what `place` reads for a leaf, in its order, and read nothing.

    Args:
        recipe: The leaf.
        sharding: Where it goes.
        source: The checkpoint.

    Yields:
        The tensor, and the part of it that one read takes.
    """
    itemsize = leaf_dtype(recipe, source, None).itemsize
    for parts in _groups(_parts(recipe.shape, sharding), itemsize):
        buffers = [np.broadcast_to(np.uint8(0), part.shape) for part in parts]
        for layer, name in enumerate(recipe.sources):
            for covering, _, _ in _pieces(recipe, layer, parts, buffers, source.info(name).dtype.itemsize):
                yield name, covering


def _pieces(
    recipe: Recipe, number: int, parts: Sequence[_Part], buffers: Sequence[np.ndarray], itemsize: int
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], np.ndarray]]:
    """Cut what the parts want of one tensor, the source of that number, into reads of about `PIECE_BYTES`.

    Yields:
        The slices to read, the slices to take of the read in factors, and the view of the buffer they belong in.
    """
    for part, buffer in zip(parts, buffers, strict=True):
        place = recipe.place_of(number)
        stacked, index = part.index[: len(place)], part.index[len(place) :]
        if not all(axis.start <= at < axis.stop for axis, at in zip(stacked, place, strict=True)):
            continue
        target = buffer[tuple(at - axis.start for axis, at in zip(stacked, place, strict=True))]
        for run in recipe.runs(index):
            own = tuple(slice(at.start - of.start, at.stop - of.start) for at, of in zip(run, index, strict=True))
            yield from _cut(recipe, *recipe.tensor_slices(run), recipe.in_tensor_order(target[own]), itemsize)


def _cut(
    recipe: Recipe,
    covering: tuple[slice, ...],
    inner: tuple[slice, ...],
    view: np.ndarray,
    itemsize: int,
    dim: int = 0,
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], np.ndarray]]:
    """Cut a read along a dimension of the tensor, and along the next where one row of it is too large for a piece."""
    place, unit = sum(map(len, recipe.factors[:dim])), math.prod(recipe.factors[dim][1:])
    first, rows = covering[dim].start, inner[place].stop
    row_bytes = unit * math.prod(cover.stop - cover.start for cover in covering[dim + 1 :]) * itemsize
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        last = min(first + stop * unit, covering[dim].stop)  # a part of one row may be all that is wanted
        read = (*covering[:dim], slice(first + start * unit, last), *covering[dim + 1 :])
        taken = (*inner[:place], slice(0, stop - start), *inner[place + 1 :])
        part = view[(slice(None),) * place + (slice(start, stop),)]
        if row_bytes > PIECE_BYTES and dim + 1 < len(covering):
            yield from _cut(recipe, read, taken, part, itemsize, dim + 1)
        else:
            yield read, taken, part


def _copy_piece(
    source: TensorSource,
    name: str,
    recipe: Recipe,
    covering: tuple[slice, ...],
    inner: tuple[slice, ...],
    target: np.ndarray,
) -> None:
    values = source.read(name, covering)
    copy_tiled(target, values.reshape(recipe.read_factors(covering))[inner])


def copy_tiled(target: np.ndarray, values: np.ndarray) -> None:
    """Copy between arrays of one shape whose memory orders may differ, in tiles that stay in cache.

    Args:
        target: Written, cast to its dtype.
        values: Read along its fastest dimension.
    """
    if values.ndim > 1 and (read := _fastest(values)) != values.ndim - 1:
        target, values = np.moveaxis(target, read, -1), np.moveaxis(values, read, -1)
    if target.dtype == values.dtype and target.dtype.kind not in "iub":
        # Plain words: extension dtypes such as bfloat16 copy element by element under the interpreter lock.
        word = np.dtype(f"u{target.dtype.itemsize}")
        target, values = target.view(word), values.view(word)
    fast = _fastest(target)
    if fast == target.ndim - 1:
        target[...] = converted(values, target.dtype)
        return
    for outer in np.ndindex(target.shape[:fast]):
        to, of = target[outer], values[outer]
        for row in range(0, to.shape[0], TILE_ROWS):
            for column in range(0, to.shape[-1], TILE_COLUMNS):
                tile = (slice(row, row + TILE_ROWS), ..., slice(column, column + TILE_COLUMNS))
                to[tile] = converted(of[tile], target.dtype)


def _fastest(array: np.ndarray) -> int:
    """Find the dimension whose neighbours lie closest together."""
    return min(range(array.ndim), key=lambda axis: (array.shape[axis] == 1, abs(array.strides[axis]), -axis))


def converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cast values; bfloat16 widens to float32 by a shift of its bits, exact and without the interpreter lock."""
    if values.dtype == dtype:
        return values
    if values.dtype == jnp.bfloat16 and dtype == np.float32:
        return (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(dtype)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an uninitialised array whose memory the CPU backend takes over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)

"""Data as Keras takes it, cut into host batches that a mesh can hold.

Entry point: `ArraySource` for arrays by name. A source opens a fresh pass per epoch; a batch that does not divide is
filled up with rows that carry no weight, or computed whole on every device; see `RowSharing`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from dew.data.global_batch import shuffled_order
from dew.placement.partition import DataPartition, WholeBatch
from dew_keras.arrays import count_rows

DEFAULT_BATCH_SIZE = 32
# More rows than any array has: one batch of all of them.
WHOLE_BATCH = 2**40


@dataclasses.dataclass(frozen=True)
class Batch:
    """One host batch.

    Attributes:
        data: This process's rows, as the objective's `prepare` reads them; all rows in a `WholeBatch`.
        rows: Rows over all processes that are no filling.
    """

    data: dict[str, Any]
    rows: int


@dataclasses.dataclass(frozen=True)
class RowSharing:
    """How batch rows meet the mesh.

    Attributes:
        divisor: Row shards of the mesh; a batch whose rows are split is a multiple of it.
        partition: This process's share of a global batch.
        fills: Whether a batch that does not divide is filled up, because rows of this model never meet. Where they may
            (in batch statistics, or in code that this library does not know) every device computes it whole.
    """

    divisor: int = 1
    partition: DataPartition = dataclasses.field(default_factory=DataPartition)
    fills: bool = True

    def round_up(self, rows: int) -> int:
        """Return the smallest batch of at least `rows` rows that the mesh can hold."""
        unit = math.lcm(self.divisor, self.partition.count)
        return -(-rows // unit) * unit

    def batch(self, data: dict[str, Any], rows: int, size: int, *, always_mask: bool) -> Batch:
        """Make a batch that the mesh can hold.

        Args:
            data: Arrays with `rows` rows first.
            rows: Rows there are.
            size: Rows to fill up to, where batches are filled.
            always_mask: As `fill_rows`.
        """
        if self.fills:
            return Batch(self.share(fill_rows(data, rows, size, always_mask=always_mask)), rows)
        return Batch(self.share(data) if rows == self.round_up(rows) else WholeBatch(data), rows)

    def share(self, data: Any) -> Any:
        """Cut this process's rows out of a global batch: one run of rows, so that order is kept."""
        count, index = self.partition.count, self.partition.index
        if count == 1:
            return data
        return jax.tree.map(lambda leaf: leaf[len(leaf) // count * index : len(leaf) // count * (index + 1)], data)


def check_count(name: str, value: Any) -> None:
    """Refuse a number of rows or batches that is no positive integer.

    Args:
        name: The argument's name, for the error.
        value: What was given; None, where an argument has a default, is let through.

    Raises:
        ValueError: If it is no count.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
        raise ValueError(f"{name} must be a positive integer. Received: {name}={value!r}")


class Source(Protocol):
    """Batches, pass after pass.

    Attributes:
        order: What decides which rows each batch holds, as far as this program knows.
    """

    @property
    def order(self) -> Mapping[str, int | None]: ...

    @property
    def steps(self) -> int | None:
        """Batches of a pass, or None when nobody knows."""
        ...

    def pass_over(self, epochs: int) -> None:
        """Leave out what an uninterrupted run would have read before the first pass.

        Args:
            epochs: Passes it would have made.
        """
        ...

    def reseed(self, seed: int) -> None:
        """Shuffle by another seed, where `order` has one.

        Args:
            seed: The seed.
        """
        ...

    def example(self) -> dict[str, Any]:
        """Return a batch for its shapes; it is not lost to the passes."""
        ...

    def open(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Start a pass.

        Args:
            epoch: Number of the pass, which decides its order.
            start: Batches at its beginning to leave out.
        """
        ...


def fill_rows(data: dict[str, Any], rows: int, size: int, *, always_mask: bool) -> dict[str, Any]:
    """Fill a batch up to a size with copies of its first row that carry no weight.

    Copies are valid inputs, where zeros could give a loss without a gradient.

    Args:
        data: Arrays with `rows` rows first; token rows under "tokens", anything else as `x`, `y`, `sample_weight`.
        rows: Rows there are.
        size: Rows there should be.
        always_mask: Mark the rows even when the batch is full, so that every batch compiles to one program.

    Returns:
        The batch, with `loss_mask` cleared or `rows` set to 0 where a row is filling.
    """
    is_filled = size > rows
    if is_filled:
        index = np.concatenate([np.arange(rows), np.zeros(size - rows, np.int64)])
        data = jax.tree.map(lambda leaf: leaf[index], data)
    if "tokens" in data:
        if is_filled or always_mask:
            mask = np.array(data.get("loss_mask", np.ones(data["tokens"].shape, bool)))
            mask[rows:] = False
            data = {**data, "loss_mask": mask}
    elif is_filled or always_mask:
        data = {**data, "rows": (np.arange(size) < rows).astype(np.float32)}
    return data


class ArraySource:
    """Arrays in memory, by name, rows first.

    Args:
        arrays: Trees of arrays with one number of rows.
        batch_size: Rows of a batch; the last one may have fewer.
        sharing: How rows meet the mesh.
        seed: Shuffles every pass by (seed, epoch); None keeps the order.

    Raises:
        ValueError: If there are no rows, or arrays differ in rows.
    """

    def __init__(
        self, arrays: Mapping[str, Any], *, batch_size: int, sharing: RowSharing, seed: int | None = None
    ) -> None:
        check_count("batch_size", batch_size)
        self.arrays = dict(arrays)
        self.rows = count_rows(self.arrays)
        self.batch_size = int(batch_size)
        self._sharing, self._seed = sharing, seed
        self._size = sharing.round_up(min(self.batch_size, self.rows))
        full = self.rows % self.batch_size == 0 or self.rows < self.batch_size
        self._mask = not full or min(self.batch_size, self.rows) != self._size

    @property
    def steps(self) -> int:
        """Batches of a pass, the last one possibly smaller."""
        return -(-self.rows // self.batch_size)

    def example(self) -> dict[str, Any]:
        """Return the first row."""
        return jax.tree.map(lambda leaf: leaf[:1], self.arrays)

    @property
    def order(self) -> dict[str, int | None]:
        """The rows, how they are cut and the seed they are shuffled by."""
        return {"rows": self.rows, "batch_size": min(self.batch_size, self.rows), "seed": self._seed}

    def pass_over(self, epochs: int) -> None:
        """Do nothing: the number of a pass decides its order.

        Args:
            epochs: Not read.
        """

    def reseed(self, seed: int) -> None:
        """Shuffle by another seed.

        Args:
            seed: The seed.
        """
        self._seed = seed

    def open(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Start a pass.

        Args:
            epoch: Number of the pass, which decides its order.
            start: Batches at its beginning to leave out.
        """
        order = None if self._seed is None else shuffled_order(self.rows, seed=self._seed, epoch=epoch)
        leaves, structure = jax.tree.flatten(self.arrays)
        for first in range(start * self.batch_size, self.rows, self.batch_size):
            stop = min(first + self.batch_size, self.rows)
            index: Any = slice(first, stop) if order is None else order[first:stop]
            data = jax.tree.unflatten(structure, [leaf[index] for leaf in leaves])
            yield self._sharing.batch(data, stop - first, self._size, always_mask=self._mask)

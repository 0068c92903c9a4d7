"""Records as streams of batches that start, stop and resume at exact positions.

Entry point: `Dataset`, with `Dataset.from_records`. A stream's position is a count of global batches, so a
run may resume on another number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dew.data.global_batch import check_batch, share_of_batch, shuffled_order, with_zero_weight
from dew.placement.partition import DataPartition

Records = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Stream = Iterator[dict[str, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What to train and to validate on.

    Attributes:
        train: `train(partition)` opens a fresh endless stream over one share of every global
            batch; see `RecordStream` for its position.
        val: `val(partition)` opens a fresh stream over one pass, or None.
        records: Records in one epoch, or None if nobody knows.
        batch: Rows of a global batch.
    """

    train: Callable[[DataPartition], Stream]
    batch: int
    val: Callable[[DataPartition], Stream] | None = None
    records: int | None = None

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in one epoch; the last may be short and is then filled with zero weight."""
        return None if self.records is None else -(-self.records // self.batch)

    @classmethod
    def from_records(cls, records: Records, *, batch: int, seed: int = 0, validation: Records | None = None) -> Dataset:
        """Make a data set of records that are in memory or in a random-access source.

        Training reshuffles by (seed, epoch); validation keeps its order and ends after one pass. The
        last batch of an epoch is filled with rows of zero weight: `loss_mask` for records with
        `tokens`, `sample_weight` for all others.

        Args:
            records: Arrays [records, ...] by name, or a sequence of records that are dicts.
            batch: Rows of a global batch.
            seed: Decides the order of the records.
            validation: Records to validate on.

        Returns:
            The data set.

        Raises:
            ValueError: If there are no records, the batch is not positive, or arrays differ in length.
        """
        if batch < 1:
            raise ValueError(f"The batch must have at least one row. Received: batch={batch}")
        training = _Source.of(records, "the training data")
        validating = None if validation is None else _Source.of(validation, "the validation data")

        def train(partition: DataPartition) -> RecordStream:
            return RecordStream(source=training, batch=batch, partition=partition, seed=seed)

        def val(partition: DataPartition) -> RecordStream:
            assert validating is not None, "a data set without validation has no val stream"
            return RecordStream(source=validating, batch=batch, partition=partition, seed=None)

        return cls(train=train, val=val if validating else None, records=training.count, batch=batch)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Records by number, whichever way they are stored."""

    count: int
    take: Callable[[np.ndarray], dict[str, np.ndarray]]

    @classmethod
    def of(cls, records: Records, name: str) -> _Source:
        if isinstance(records, Mapping):
            return cls._of_arrays(records, name)
        if not hasattr(records, "__getitem__") or not hasattr(records, "__len__"):
            raise TypeError(
                f"Records are arrays by name or a sequence of dicts. Received for {name}: {type(records).__name__}"
            )
        if len(records) == 0:
            raise ValueError(f"There is no data: {name} has 0 records.")

        def take(numbers: np.ndarray) -> dict[str, np.ndarray]:
            rows = [records[int(number)] for number in numbers]
            return {key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]}

        return cls(count=len(records), take=take)

    @classmethod
    def _of_arrays(cls, records: Mapping[str, Any], name: str) -> _Source:
        arrays = {key: np.asarray(value) for key, value in records.items()}
        lengths = {key: len(value) if value.ndim else 0 for key, value in arrays.items()}
        if not lengths or max(lengths.values()) == 0:
            raise ValueError(f"There is no data: {name} has 0 records. Received: {lengths}")
        if len(set(lengths.values())) > 1:
            raise ValueError(f"The arrays of {name} must have one length. Received: {lengths}")
        return cls(
            count=next(iter(lengths.values())),
            take=lambda numbers: {key: value[numbers] for key, value in arrays.items()},
        )


class RecordStream(Iterator[dict[str, np.ndarray]]):
    """One share of every global batch, in order, from a position that can be read and set."""

    def __init__(self, *, source: _Source, batch: int, partition: DataPartition, seed: int | None) -> None:
        """Open the stream at its first batch.

        Args:
            source: The records.
            batch: Rows of a global batch.
            partition: The share to read.
            seed: Shuffles every epoch anew, without end; None keeps the order and ends after
                one pass.

        Raises:
            ValueError: If the batch does not divide into the partition's shares.
        """
        check_batch(batch, partition)
        self._source, self._batch, self._partition, self._seed = source, batch, partition, seed
        self._delivered = 0
        self._epoch: int | None = None
        self._order = np.empty(0, np.int64)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one pass."""
        return -(-self._source.count // self._batch)

    def __next__(self) -> dict[str, np.ndarray]:
        """Deliver this share of the next global batch."""
        epoch, number = divmod(self._delivered, self.steps_per_epoch)
        if self._seed is None and epoch:
            raise StopIteration
        if epoch != self._epoch:
            self._order, self._epoch = self._epoch_order(epoch), epoch
        numbers, real = share_of_batch(self._order, number, self._batch, self._partition)
        batch = with_zero_weight(self._source.take(numbers), real)
        self._delivered += 1
        return batch

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(self._source.count)
        return shuffled_order(self._source.count, seed=self._seed, epoch=epoch)

    def get_state(self) -> dict[str, int | None]:
        """Say how far the stream has come.

        Returns:
            Global batches delivered, with the records, batch and seed they were cut from. JSON
            holds it, and it is the same on every process.
        """
        return {
            "batches": self._delivered,
            "records": self._source.count,
            "batch": self._batch,
            "seed": self._seed,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `get_state` returned, on any number of processes.

        Args:
            state: The position.

        Raises:
            ValueError: If it belongs to other data, another batch or another seed; the stream
                then stays where it is.
        """
        here = self.get_state()
        wrong = [key for key in ("records", "batch", "seed") if state.get(key) != here[key]]
        batches = state.get("batches")
        if wrong or not isinstance(batches, int) or batches < 0:
            detail = ", ".join(f"{key} {state.get(key)} (here {here[key]})" for key in wrong)
            raise ValueError(
                f"This position belongs to another stream: {detail or f'batches {batches!r}'}. "
                "Open the data with the records, batch and seed of the run that saved it."
            )
        self._delivered = batches

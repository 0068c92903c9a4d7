"""Data that comes a batch at a time: iterables, generators and PyDatasets, and epochs of a fixed number of batches.

Entry points: `keras_source` for whatever a Keras verb takes, `SlicedSource`.
"""

from __future__ import annotations

import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from dew_keras.arrays import count_rows, is_array_tree, keras_arrays
from dew_keras.inputs import (
    DEFAULT_BATCH_SIZE,
    ArraySource,
    Batch,
    RowSharing,
    Source,
    check_count,
)
from dew_keras.prefetch import DatasetPass


class IterableSource:
    """Batches that come from an object, one pass after another.

    Args:
        iterate: Starts a pass; items with a method `skip(count)` leave that many out without making them.
        convert: Turns one item into arrays by name.
        sharing: How rows meet the mesh; every process sees the global batches.
        steps: Batches of a pass when known.
        when_spent: What to say when a pass gives nothing.
        is_begun: Whether somebody took batches of the only pass already.
    """

    def __init__(
        self,
        iterate: Callable[[int], Iterable[Any]],
        convert: Callable[[Any], dict[str, Any]],
        *,
        sharing: RowSharing,
        steps: int | None,
        when_spent: str,
        is_begun: bool = False,
    ) -> None:
        self._iterate, self._convert, self._sharing = iterate, convert, sharing
        self.steps = steps
        self._when_spent = when_spent
        self.can_skip = not is_begun
        self._largest = 0
        self._begun: tuple[tuple[dict[str, Any], int], Any, Iterator[tuple[dict[str, Any], int]]] | None = None

    @property
    def order(self) -> dict[str, int | None]:
        """Nothing: only the object knows what it gives."""
        return {}

    def example(self) -> dict[str, Any]:
        """Return the first batch of the next pass, not filled up."""
        if self._begun is None:
            items = iter(self._iterate(0))
            stream = self._converted(items, 0)
            self._begun = next(stream), items, stream
        return self._begun[0][0]

    def pass_over(self, epochs: int) -> None:
        """Do nothing: the object orders itself.

        Args:
            epochs: Passes an uninterrupted run would have made; not read.
        """

    def open(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Start a pass, or go on with the one that `example` began.

        Args:
            epoch: Number of the pass.
            start: Batches at its beginning to leave out.

        Raises:
            ValueError: If the pass gives no batch.
        """
        start = self.skippable(start)
        begun, self._begun = self._begun, None
        if begun is None:
            items = iter(self._iterate(epoch))
            yield from itertools.starmap(self._filled, self._converted(items, start))
            return
        first, items, stream = begun
        if not start:
            yield self._filled(*first)
        elif hasattr(items, "skip"):
            items.skip(start - 1)
        else:
            stream = itertools.islice(stream, start - 1, None)
        yield from itertools.starmap(self._filled, stream)

    def reseed(self, seed: int) -> None:
        """Do nothing: the object orders itself.

        Args:
            seed: Not read.
        """

    def skippable(self, batches: int) -> int:
        """Return how many batches to leave out, and warn where their place was lost.

        Args:
            batches: How many an uninterrupted run would have read.
        """
        if not batches or self.can_skip:
            return batches
        warnings.warn(
            "The generator was begun before this fit and cannot go back to where the run was saved: training goes on "
            "with its next batch. Make the generator anew to resume exactly.",
            stacklevel=2,
        )
        return 0

    def _converted(self, items: Any, start: int) -> Iterator[tuple[dict[str, Any], int]]:
        found = start > 0
        if start and hasattr(items, "skip"):
            items.skip(start)
            start = 0
        for item in items:
            found = True
            data = self._convert(item)
            rows = count_rows(data)
            self._largest = max(self._largest, self._sharing.round_up(rows))
            if start:
                start -= 1
                continue
            yield data, rows
        if not found:
            raise ValueError(self._when_spent)

    def _filled(self, data: dict[str, Any], rows: int) -> Batch:
        return self._sharing.batch(data, rows, self._largest, always_mask=False)


class SlicedSource:
    """A fixed number of batches per epoch, which go on where the last epoch stopped.

    Arrays begin where the first epoch's number puts it, as their order follows from numbers; other sources begin with
    their first batch.

    Args:
        source: Where batches come from; a spent pass is followed by the next.
        steps: Batches per epoch.
    """

    def __init__(self, source: Source, steps: int) -> None:
        check_count("steps_per_epoch", steps)
        self.steps = int(steps)
        self._source = source
        self._passed = 0
        self._stream: Iterator[Batch] | None = None

    @property
    def order(self) -> dict[str, int | None]:
        """What orders the source, and how it is cut."""
        return {**self._source.order, "steps_per_epoch": self.steps}

    def example(self) -> dict[str, Any]:
        """Return a batch for its shapes."""
        return self._source.example()

    def pass_over(self, epochs: int) -> None:
        """Leave out what an uninterrupted run would have read before the first epoch.

        Args:
            epochs: Epochs it would have made.
        """
        self._passed = epochs * self.steps

    def reseed(self, seed: int) -> None:
        """Shuffle by another seed, where `order` has one.

        Args:
            seed: The seed.
        """
        self._source.reseed(seed)

    def open(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Go on for one epoch.

        Args:
            epoch: Number of the epoch; read where arrays begin.
            start: Batches at its beginning to leave out; the first epoch only.
        """
        if self._stream is None:
            first = epoch * self.steps if isinstance(self._source, ArraySource) else self._passed
            self._stream = self._endless(first + start)
        for _ in range(self.steps - start):
            yield next(self._stream)

    def _endless(self, skipped: int) -> Iterator[Batch]:
        source, epoch = self._source, 0
        if isinstance(source, IterableSource):
            skipped = source.skippable(skipped)
        if source.steps is not None:
            epoch, skipped = divmod(skipped, source.steps)
            source.pass_over(epoch)
        while True:
            for batch in source.open(epoch, skipped if source.steps is not None else 0):
                if source.steps is None and skipped:
                    skipped -= 1
                    continue
                yield batch
            if source.steps is not None:
                skipped = 0
            epoch += 1


def keras_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None,
    sharing: RowSharing,
    seed: int | None = None,
    class_weight: Mapping[Any, float] | None = None,
) -> Source:
    """Make a source of what `fit`, `evaluate` or `predict` was given.

    Args:
        x: Arrays, or a PyDataset, a generator, or an iterable of (x,), (x, y) or (x, y, sample_weight).
        y: Targets, with arrays only.
        sample_weight: Weights, with arrays only.
        batch_size: Rows of a batch, with arrays only; None is 32.
        sharing: How rows meet the mesh.
        seed: Shuffles arrays, and the batches of a PyDataset, by (seed, epoch); None keeps their order.
        class_weight: Weight by class, for training on one output.

    Raises:
        ValueError: If the forms do not go together, or the data is of no known form.
    """
    if is_array_tree(x):
        arrays = keras_arrays(x, y, sample_weight, class_weight)
        rows = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        return ArraySource(arrays, batch_size=rows, sharing=sharing, seed=seed)
    is_stream = hasattr(x, "__iter__") and not isinstance(x, str | bytes | list | tuple | Mapping)
    if not is_stream and not isinstance(x, keras.utils.PyDataset):
        raise ValueError(f"Unrecognized data type: x={x!r} of type {type(x)}. Give arrays, a PyDataset or an iterable.")
    kind = type(x).__name__
    for name, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)):
        if value is not None:
            raise ValueError(f"`{name}` goes with arrays; a {kind} gives whole batches itself. Leave {name} out.")
    if class_weight is not None and not isinstance(x, keras.utils.PyDataset):
        raise ValueError(f"`class_weight` goes with arrays and PyDatasets, not with a {kind}.")

    def convert(item: Any) -> dict[str, Any]:
        return keras_arrays(*unpacked(item, kind), class_weight)

    if isinstance(x, keras.utils.PyDataset):
        return DatasetSource(x, convert, sharing=sharing, seed=seed)
    if isinstance(x, types.GeneratorType):
        is_begun = inspect.getgeneratorstate(x) != inspect.GEN_CREATED
        spent = (
            "The generator is spent: it cannot start again for another pass. Give steps_per_epoch with an endless "
            "generator, or a PyDataset."
        )
        return IterableSource(
            lambda epoch: x, convert, sharing=sharing, steps=None, when_spent=spent, is_begun=is_begun
        )
    steps = len(x) if hasattr(x, "__len__") else None
    spent = f"A pass over the {kind} gave no batch."
    return IterableSource(lambda epoch: iter(x), convert, sharing=sharing, steps=steps, when_spent=spent)


class DatasetSource(IterableSource):
    """Batches of a `keras.utils.PyDataset`, with its hooks at both ends of an epoch.

    Args:
        dataset: The data set.
        convert: Turns one of its batches into arrays by name.
        sharing: How rows meet the mesh.
        seed: Shuffles the batches of every pass by (seed, epoch), where their number is known; None keeps the order.
    """

    def __init__(
        self, dataset: Any, convert: Callable[[Any], dict[str, Any]], *, sharing: RowSharing, seed: int | None = None
    ) -> None:
        super().__init__(
            self._pass,
            convert,
            sharing=sharing,
            steps=dataset.num_batches,
            when_spent=f"The {type(dataset).__name__} has no batch.",
        )
        self._dataset, self._seed = dataset, seed

    def _pass(self, epoch: int) -> DatasetPass:
        return DatasetPass(self._dataset, epoch=epoch, seed=self._seed)

    @property
    def order(self) -> dict[str, int | None]:
        """How many batches there are and the seed they are shuffled by."""
        return {} if self.steps is None else {"batches": self.steps, "seed": self._seed}

    def reseed(self, seed: int) -> None:
        """Shuffle by another seed, where batches are shuffled.

        Args:
            seed: The seed.
        """
        self._seed = None if self._seed is None else seed

    def pass_over(self, epochs: int) -> None:
        """Do between passes what the data set does; see `IterableSource`.

        Args:
            epochs: Passes an uninterrupted run would have made.
        """
        begun, self._begun = self._begun, None if epochs else self._begun
        if epochs and begun is not None:
            self._dataset.on_epoch_end()
        for _ in range(epochs - (begun is not None)):
            self._dataset.on_epoch_begin()
            self._dataset.on_epoch_end()

    def open(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Start a pass, or go on with the one that `example` began; see `IterableSource`.

        Args:
            epoch: Number of the pass, which decides its order.
            start: Batches at its beginning to leave out.
        """
        if self._begun is not None and not self._begun[1].is_ordered_by(epoch, self._seed):
            # The batch that `example` took stands elsewhere in this pass: it is made again when its turn comes.
            (_, items, stream), self._begun = self._begun, None
            items.order_by(epoch, self._seed, start)
            return itertools.starmap(self._filled, stream)
        return super().open(epoch, start)


def unpacked(item: Any, kind: str) -> tuple[Any, Any, Any]:
    """Take an item of an iterable apart.

    Args:
        item: (x,), (x, y) or (x, y, sample_weight); the inputs alone, an array or a dict, but from a generator.
        kind: What gave it, for the error.

    Raises:
        ValueError: If it is none of these.
    """
    if kind != "generator":  # from a generator Keras takes tuples only
        is_inputs = isinstance(item, Mapping) or hasattr(item, "shape")
        item = (item,) if is_inputs else tuple(item) if isinstance(item, list) else item
    if not isinstance(item, tuple) or not 1 <= len(item) <= 3:
        raise ValueError(
            f"A {kind} must give tuples (x,), (x, y) or (x, y, sample_weight). Received: {type(item).__name__}"
        )
    return tuple([*item, None, None][:3])  # type: ignore[return-value]

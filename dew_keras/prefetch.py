"""Batches of a `keras.utils.PyDataset`, shuffled where that is asked for and fetched ahead by its workers.

Entry points: `DatasetPass`, one pass over a data set; `fetched`.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dew.data.global_batch import shuffled_order


class DatasetPass:
    """One pass over a `keras.utils.PyDataset`, which can go to any batch.

    Args:
        dataset: The data set; its hooks are called where the pass begins and ends.
        epoch: Number of the pass.
        seed: Shuffles the batches by (seed, epoch); None, or a data set without end, keeps the order.
    """

    def __init__(self, dataset: Any, *, epoch: int, seed: int | None) -> None:
        self._dataset, self._epoch, self._seed = dataset, epoch, seed
        self._number, self._is_begun = 0, False
        self._items: Iterator[Any] | None = None

    def skip(self, count: int) -> None:
        """Leave out the next batches.

        Args:
            count: How many.
        """
        self._number += count
        self._items = None

    def is_ordered_by(self, epoch: int, seed: int | None) -> bool:
        """Say whether these numbers give the batches in the same order.

        Args:
            epoch: Number of a pass.
            seed: Its seed.
        """
        return seed == self._seed and (seed is None or epoch == self._epoch)

    def order_by(self, epoch: int, seed: int | None, number: int) -> None:
        """Begin again in another order, without calling the hooks of the data set again.

        Args:
            epoch: Number of the pass.
            seed: Its seed.
            number: Batches at its beginning to leave out.
        """
        self._epoch, self._seed, self._number, self._items = epoch, seed, number, None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._is_begun:
            self._is_begun = True
            self._dataset.on_epoch_begin()
            self._count = self._dataset.num_batches
        if self._items is None:
            self._items = fetched(self._dataset, self._numbers())
        try:
            item = next(self._items)
        except StopIteration:
            self._dataset.on_epoch_end()
            raise
        self._number += 1
        return item

    def _numbers(self) -> Iterable[int]:
        if self._count is None:
            return itertools.count(self._number)
        if self._seed is None:
            return range(self._number, self._count)
        order = shuffled_order(self._count, seed=self._seed, epoch=self._epoch)
        return map(int, order[self._number :])


def fetched(dataset: Any, numbers: Iterable[int]) -> Iterator[Any]:
    """Give batches of a data set, as many threads working ahead as it asks for.

    Args:
        dataset: The data set; its `workers` and `max_queue_size` are honoured.
        numbers: Numbers of the batches.
    """
    if dataset.use_multiprocessing:
        warnings.warn(
            f"{type(dataset).__name__}(use_multiprocessing=True): batches are fetched by threads of this process, "
            "since a process that computes on devices must not be forked. Decode in libraries that release the "
            "interpreter, or leave the option out.",
            stacklevel=2,
        )
    if dataset.workers <= 1:
        yield from (dataset[number] for number in numbers)
        return
    ahead = max(1, int(dataset.max_queue_size))
    remaining = iter(numbers)
    with ThreadPoolExecutor(int(dataset.workers), thread_name_prefix="dew-batches") as pool:
        waiting: collections.deque[Future[Any]] = collections.deque()
        try:
            while True:
                missing = itertools.islice(remaining, ahead - len(waiting))
                waiting.extend(pool.submit(dataset.__getitem__, number) for number in missing)
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            # A pass that is left early must not wait for batches that nobody reads.
            for future in waiting:
                future.cancel()

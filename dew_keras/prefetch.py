"""Batches of a `keras.utils.PyDataset` fetched ahead by its workers, in order.

Entry point: `fetched`.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


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

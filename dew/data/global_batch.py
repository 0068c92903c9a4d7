"""Which records make up global batch k, and the share of it that one process reads.

Entry points: `shuffled_order`, `share_of_batch`, `with_zero_weight`. Record order and shares
depend on the seed and the epoch only, so batch k holds the same records at every process count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dew.placement.partition import DataPartition


def shuffled_order(num_records: int, *, seed: int, epoch: int) -> np.ndarray:
    """Shuffle record numbers, the same way on every machine and NumPy version.

    Args:
        num_records: How many there are.
        seed: The run's seed.
        epoch: Counted from 0; each has its own order.

    Returns:
        int64 [num_records], each number once.
    """
    # NumPy keeps the raw streams of its bit generators stable but not `permutation`, and a resumed
    # run may meet another version.
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_records)
    return np.argsort(np.asarray(keys, np.uint64), kind="stable")


def check_batch(batch: int, partition: DataPartition) -> None:
    """Refuse a global batch that does not divide into equal shares.

    Args:
        batch: Rows of the global batch.
        partition: Which share is read, of how many.

    Raises:
        ValueError: If the batch is not a positive multiple of the number of shares.
    """
    if batch < 1 or batch % partition.count:
        above = -(-max(batch, 1) // partition.count) * partition.count
        raise ValueError(
            f"A global batch of {batch} rows does not divide into {partition.count} equal shares. "
            f"Use a multiple of {partition.count}, such as {above}."
        )


def share_of_batch(order: np.ndarray, number: int, batch: int, partition: DataPartition) -> tuple[np.ndarray, int]:
    """Pick this process's records of one global batch.

    Args:
        order: Record numbers in the order of the epoch.
        number: Which batch of the epoch, from 0.
        batch: Rows of the global batch.
        partition: Which share, of how many; records are cut `index::count`.

    Returns:
        Record numbers [batch / count] and how many of them are real. Those after are repeats
        that fill the last batch of an epoch and must carry no weight.
    """
    rows = order[number * batch : (number + 1) * batch]
    mine = rows[partition.index :: partition.count]
    size = batch // partition.count
    # A share of a short batch may be empty; any record then gives its rows their shapes.
    filler = np.full(size - len(mine), rows[0], order.dtype)
    return np.concatenate([mine, filler]), len(mine)


def with_zero_weight(batch: Mapping[str, Any], real: int) -> dict[str, np.ndarray]:
    """Take the weight off the rows that only fill a batch.

    Token rows carry it in `loss_mask`, everything else in `sample_weight`; the field is made
    where it is missing, in full batches too, so that every process hands over the same tree.

    Args:
        batch: Arrays [rows, ...] by name.
        real: How many rows, from the first, are real.

    Returns:
        A new dict.
    """
    rows = {name: np.asarray(value) for name, value in batch.items()}
    size = len(next(iter(rows.values())))
    if "tokens" in rows:
        name, full = "loss_mask", np.ones_like(rows["tokens"], bool)
    else:
        name, full = "sample_weight", np.ones_like(next(iter(rows.values())), np.float32, shape=(size,))
    weights = rows.get(name, full).copy()
    weights[real:] = 0
    return {**rows, name: weights}

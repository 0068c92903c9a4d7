"""One pass over held-out batches, pooled in double precision on the host.

Entry point: `pooled_statistics`. Two batches are in flight; none is waited for while it is new.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from dew.objectives.base import Ratio, pool

MAX_IN_FLIGHT = 2


def pooled_statistics(
    score: Callable[[Mapping[str, Any]], dict[str, Ratio]], batches: Iterable[Mapping[str, Any]]
) -> dict[str, Ratio]:
    """Score every batch and add the ratios up.

    Args:
        score: Starts the scoring of one host batch and returns device ratios.
        batches: Host batches.

    Returns:
        Host ratios by name: one total over one mass for the whole pass.

    Raises:
        ValueError: If there are no batches.
    """
    pooled: dict[str, Ratio] = {}
    in_flight: collections.deque[dict[str, Ratio]] = collections.deque()
    for batch in batches:
        in_flight.append(score(batch))
        if len(in_flight) > MAX_IN_FLIGHT:
            pooled = pool(pooled, read_ratios(in_flight.popleft()))
    while in_flight:
        pooled = pool(pooled, read_ratios(in_flight.popleft()))
    if not pooled:
        raise ValueError("There is nothing to evaluate: the data gave no batch. Give at least one row.")
    return pooled


def read_ratios(statistics: Mapping[str, Ratio]) -> dict[str, Ratio]:
    """Copy ratios to the host in one transfer, waiting for the device.

    Args:
        statistics: Device ratios by name.

    Returns:
        Ratios of Python floats, "loss" first (a compiled function returns names sorted).
    """
    values = jax.device_get(dict(statistics))
    names = sorted(values, key=lambda name: (name != "loss", name))
    # Floats add in double precision; an objective may report other sums than ratios, of arrays.
    number = lambda value: float(value) if np.ndim(value) == 0 else np.float64(value)  # noqa: E731
    return {name: jax.tree.map(number, values[name]) for name in names}

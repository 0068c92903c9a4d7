"""What a run prints: pooled statistics and throughput, from steps that are already done.

Entry point: `Report`. It never waits for the device; a line appears when its last step is read.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

from dew.objectives.base import Ratio, pool
from dew.training.loop import StepResult


class Report:
    """Pool step results and write a line every so many steps.

    Args:
        values: Divides pooled ratios into named numbers, an objective's `report`.
        every: Steps per line.
        total: Steps of the whole run, for the line's head.
        write: Takes a line; None writes nothing.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        values: Callable[[Mapping[str, Ratio]], Mapping[str, float]],
        *,
        every: int,
        total: int,
        write: Callable[[str], Any] | None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if every < 1:
            raise ValueError(f"log_every must be at least 1. Received: log_every={every}.")
        self._values, self._every, self._total, self._write, self._clock = values, every, total, write, clock
        self._pending: collections.deque[StepResult] = collections.deque()
        self._pooled: dict[str, Ratio] = {}
        self._steps = 0
        self._last_step = 0
        self._since = clock()
        self._before = (0, 0.0, 0.0)  # steps, seconds and mass of the last line

    def add(self, result: StepResult) -> None:
        """Take a started step and write whatever is complete by now.

        Args:
            result: A result of the loop.
        """
        self._pending.append(result)
        while self._pending and self._pending[0].is_ready():
            self._read(self._pending.popleft())

    def finish(self) -> None:
        """Wait for the steps not read yet and write the line of an incomplete interval."""
        while self._pending:
            self._read(self._pending.popleft())
        if self._steps:
            self._line(self._last_step)

    def note(self, label: str, step: int, statistics: Mapping[str, Ratio]) -> None:
        """Write a line of other statistics, such as a validation pass.

        Args:
            label: What they are.
            step: Step they belong to.
            statistics: Host ratios.
        """
        if self._write is not None:
            self._write(f"step {step}/{self._total} {label}: {_numbers(self._values(statistics))}")

    def _read(self, result: StepResult) -> None:
        self._pooled = pool(self._pooled, result.read())
        self._steps, self._last_step = self._steps + 1, result.step
        if result.step % self._every == 0:
            self._line(result.step)

    def _line(self, step: int) -> None:
        now = self._clock()
        steps, seconds, mass = self._steps, now - self._since, self._pooled["loss"].mass
        before, self._before = self._before, (steps, seconds, mass)
        if steps < self._every:
            # A line is written when its last step is read, up to two steps late: the few after it would look fast.
            steps, seconds, mass = steps + before[0], seconds + before[1], mass + before[2]
        if self._write is not None:
            self._write(
                f"step {step}/{self._total}: {_numbers(self._values(self._pooled))} - "
                f"{seconds / steps * 1e3:.0f} ms/step - {mass / max(seconds, 1e-9):.0f} scored/s"
            )
        self._pooled, self._steps, self._since = {}, 0, now


def _numbers(values: Mapping[str, float]) -> str:
    return " - ".join(f"{name}: {value:.4f}" for name, value in values.items())

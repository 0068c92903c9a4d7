"""The one training loop: host batches in, step results out, at most two steps in flight.

Entry point: `Loop`, which `Trainer.fit` and the Keras facade both consume. Nothing here waits
for the step it just started; the loop waits for the step before the last.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dew.objectives.base import Ratio
from dew.training.evaluate import read_ratios
from dew.training.state import TrainState

MAX_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one training step reports; its numbers may still be in the making.

    Attributes:
        step: Batches consumed when the step is done.
        statistics: Ratios of this batch by name, on the device.
        applied: Whether an optimizer update was applied, a boolean scalar on the device.
    """

    step: int
    statistics: dict[str, Ratio]
    applied: Any

    def is_ready(self) -> bool:
        """Say whether the numbers can be read without waiting."""
        return self.applied.is_ready()

    def read(self) -> dict[str, Ratio]:
        """Copy the ratios to the host, waiting for the step if it is not done."""
        return read_ratios(self.statistics)


class NonFiniteLossError(RuntimeError):
    """Too many consecutive steps had a loss that is not finite."""


class Loop:
    """Run training steps one host batch at a time.

    The state is readable and assignable between steps. A step consumes the memory of the state
    before it, so keep a copy (`jax.tree.map(jnp.copy, ...)`) of what must outlive it.

    Args:
        start: Dispatches steps: a function of (state, host batches, microstep) giving the next
            state, statistics and whether an update was applied, stacked where there are several batches.
        place: Moves an assigned state to where the steps expect it.
        state: The state to begin with; the loop owns it from here.
        accumulation: Batches per update.
        nonfinite_limit: Stop after this many consecutive losses that are not finite; None
            never stops.
    """

    def __init__(
        self,
        start: Callable[
            [TrainState, Sequence[Mapping[str, Any]], int, int], tuple[TrainState, dict[str, Ratio], jax.Array]
        ],
        place: Callable[[TrainState], TrainState],
        state: TrainState,
        *,
        accumulation: int = 1,
        nonfinite_limit: int | None = 5,
    ):
        if nonfinite_limit is not None and nonfinite_limit < 1:
            raise ValueError(f"nonfinite_limit must be at least 1 or None. Received: {nonfinite_limit}.")
        self._start = start
        self._place = place
        self._accumulation = accumulation
        self._nonfinite_limit = nonfinite_limit
        self._nonfinite_in_a_row = 0
        self._in_flight: collections.deque[StepResult] = collections.deque()
        self._state = place(state)
        self._step = int(state.step)
        self._microstep = int(state.microstep)

    @property
    def state(self) -> TrainState:
        """The state after the last step that was started."""
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        # Only a counter that somebody replaced is read back: reading waits for the device.
        if state.step is not self._state.step:
            self._step = int(state.step)
        if state.microstep is not self._state.microstep:
            self._microstep = int(state.microstep)
        self._state = self._place(state)

    def lend(self, state: TrainState) -> None:
        """Take a state as it is placed, whose counters are the present one's.

        For weights that are moved away and brought back between two steps.

        Args:
            state: The state.
        """
        self._state = state

    @property
    def batches(self) -> int:
        """Batches whose steps were started, those before this loop included."""
        return self._step

    def run(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[StepResult]:
        """Train on each batch in turn.

        Args:
            batches: Host batches as the objective's `prepare` reads them, whole rows first.

        Yields:
            One result per batch, as soon as its step is started.

        Raises:
            ValueError: If a batch cannot be trained on; the state is as before it.
            NonFiniteLossError: After too many consecutive losses that are not finite.
        """
        for batch in batches:
            yield self.step(batch)
        self.drain()

    def step(self, *batches: Mapping[str, Any], room: int = 1) -> StepResult:
        """Start the step of one host batch, or the steps of several like ones as one program.

        Args:
            batches: Host batches.
            room: Most batches the program takes, as many as are given or more; fewer need no program of their own.

        Returns:
            The result, usually before the device is done; numbers of several batches are stacked.
        """
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._retire()
        self._state, statistics, applied = self._start(self._state, batches, self._microstep, max(room, len(batches)))
        self._microstep = (self._microstep + len(batches)) % self._accumulation
        self._step += len(batches)
        result = StepResult(self._step, statistics, applied)
        self._in_flight.append(result)
        return result

    def drain(self) -> None:
        """Wait for every started step."""
        while self._in_flight:
            self._retire()

    def _retire(self) -> None:
        result = self._in_flight.popleft()
        if self._nonfinite_limit is None:
            jax.block_until_ready(result.applied)
            return
        losses = np.atleast_1d(np.asarray(result.statistics["loss"].total))  # waits for this old step only
        for offset, loss in enumerate(losses, result.step - len(losses) + 1):
            self._nonfinite_in_a_row = 0 if math.isfinite(loss) else self._nonfinite_in_a_row + 1
            if self._nonfinite_in_a_row >= self._nonfinite_limit:
                raise NonFiniteLossError(
                    f"The loss was not finite for {self._nonfinite_in_a_row} consecutive steps, the last one step "
                    f"{offset} with {loss}. The weights are those before the first of them. Lower the learning "
                    "rate or clip the gradient (clip_norm=1.0)."
                )

"""Which microbatch each pipeline stage works on at each tick: timetables as data, and what follows from them.

Entry points: `Schedule`, `SCHEDULES`, `Timetable` (GPipe: https://arxiv.org/abs/1811.06965, section 2.3; 1F1B:
https://arxiv.org/abs/1806.03377, section 3.2). All stages tick together, idle ones too.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

ScheduleName = Literal["gpipe", "1f1b"]

IDLE = -1
"""A timetable's entry where a stage has nothing to do."""


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
    """The microbatches of a training step, tick by tick.

    In one tick a stage may run one microbatch forward and one backward, forward first.

    Attributes:
        forward: int32 [ticks, stages], the microbatch each stage runs forward; `IDLE` for none.
        backward: int32 [ticks, stages], likewise backward.
    """

    forward: np.ndarray
    backward: np.ndarray

    @property
    def num_stages(self) -> int:
        """How many stages work."""
        return self.forward.shape[1]

    @property
    def num_microbatches(self) -> int:
        """How many microbatches every stage runs."""
        return int(self.forward.max()) + 1

    @property
    def forward_ticks(self) -> int:
        """Ticks in which stages run forward; the idle ones take as long as the others."""
        return int((self.forward != IDLE).any(axis=1).sum())

    @property
    def backward_ticks(self) -> int:
        """Ticks in which stages run backward."""
        return int((self.backward != IDLE).any(axis=1).sum())

    @property
    def slots(self) -> int:
        """Places for kept inputs on a stage: that of tick t is t modulo their number."""
        return int((self._ticks(self.backward) - self._ticks(self.forward)).max()) + 1

    @property
    def read_slots(self) -> np.ndarray:
        """Place of the input that each backward pass reads, int32 [ticks, stages]; the first for idle stages."""
        kept_at = self._ticks(self.forward)[self.backward, np.arange(self.num_stages)]
        return np.where(self.backward == IDLE, 0, kept_at % self.slots).astype(np.int32)

    def _ticks(self, entries: np.ndarray) -> np.ndarray:
        """Give the tick of each microbatch on each stage, [microbatches, stages]."""
        return np.stack([(entries == number).argmax(axis=0) for number in range(self.num_microbatches)])

    def bubble(self, backward_cost: float = 2.0) -> float:
        """Give the share of the stages' time in which they are idle.

        Args:
            backward_cost: Time of a backward pass over that of a forward pass.
        """
        useful = self.num_microbatches * (1 + backward_cost)
        return 1 - useful / (self.forward_ticks + backward_cost * self.backward_ticks)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An order of a pipeline's work: whatever runs, refuses, counts or draws one asks here.

    Attributes:
        name: What users call it.
        timetable: (stages, microbatches) -> the ticks of a step.
        scores_inside: Whether a microbatch is scored, and runs backward, before all have run forward. Then a step makes
            its own gradients, those of the token cross entropy (`one_f_one_b.scheduled_loss`, for any timetable in
            which a microbatch moves one stage a tick and is scored in the tick in which it leaves the last); else it is
            differentiated as it stands, under any objective.
    """

    name: ScheduleName
    timetable: Callable[[int, int], Timetable]
    scores_inside: bool


def gpipe_timetable(num_stages: int, num_microbatches: int) -> Timetable:
    """Run all microbatches forward, then all backward in the opposite order.

    The idle share is (S - 1) / (M + S - 1), and every stage keeps what its M microbatches need. With F and H the
    operations of the stack's and the head's forward pass on the whole batch, each of n devices computes
    (3 F (M + S - 1) / M + 3 H) / n: stages tick together, and an idle one computes on values that are never used.

    Args:
        num_stages: Stages S.
        num_microbatches: Microbatches M.
    """
    forward = _entries(np.arange(num_microbatches + num_stages - 1)[:, None] - np.arange(num_stages), num_microbatches)
    idle = np.full_like(forward, IDLE)
    return Timetable(np.concatenate([forward, idle]), np.concatenate([idle, forward[::-1]]))


def one_f_one_b_timetable(num_stages: int, num_microbatches: int) -> Timetable:
    """Run each microbatch backward as soon as the last stage has scored it, in lockstep.

    Stage s runs microbatch t - s forward and t - 2 (S - 1) + s backward at tick t. No stage runs backward in the first
    S - 1 ticks and none forward in the last, so the idle share is GPipe's, (S - 1) / (M + S - 1). Every stage has
    places for 2 S - 1 inputs, whatever M is. Each of n devices computes (4 F (M + S - 1) / M + 3 H) / n, F and H as in
    `gpipe_timetable`: a stage runs forward once more before it runs backward.

    Args:
        num_stages: Stages S.
        num_microbatches: Microbatches M.
    """
    ticks, stages = np.arange(num_microbatches + 2 * (num_stages - 1))[:, None], np.arange(num_stages)
    return Timetable(
        _entries(ticks - stages, num_microbatches),
        _entries(ticks - 2 * (num_stages - 1) + stages, num_microbatches),
    )


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", gpipe_timetable, scores_inside=False),
        Schedule("1f1b", one_f_one_b_timetable, scores_inside=True),
    )
}
"""By name. One whose stages hold several chunks of layers (interleaved, https://arxiv.org/abs/2104.04473, section 2.2)
would say in its timetable which chunk an entry is about."""


def _entries(microbatches: np.ndarray, count: int) -> np.ndarray:
    """Mark what lies outside the step's microbatches as idle."""
    return np.where((microbatches >= 0) & (microbatches < count), microbatches, IDLE).astype(np.int32)

"""What the engine does with a run that was read from a file: `RestoresRuns`, which `Engine` inherits."""

from __future__ import annotations

import dataclasses
from typing import Any

from dew.training.state import TrainState
from dew_keras.compiled import Compiled
from dew_keras.kept_state import windowed_state
from dew_keras.loop import FitRun
from dew_keras.progress import Progress
from dew_keras.run_state import SavedRun
from dew_keras.waiting import WaitingRun


class RestoresRuns:
    """Places a saved run in the running fit, or keeps it for the next one."""

    compiled: Compiled | None
    given_variables: Any
    is_built: Any
    is_language_model: Any
    is_pretrained: Any
    seed: int
    trainer: Any
    variables: Any
    view: Any
    waiting: WaitingRun
    _run: FitRun | None

    @property
    def progress(self) -> Progress | None:
        """Where the running fit is in its data, or None."""
        return None if self._run is None else self._run.progress

    @property
    def makes_weights(self) -> bool:
        """Whether there are weights, or `load` can make them without data."""
        return self.is_built or self.is_language_model or self.is_pretrained or self.given_variables is not None

    def restore(self, saved: SavedRun | None, skipped: frozenset[str] = frozenset()) -> None:
        """Go on with a run that was read from a file, now while a fit runs, else when the next one starts.

        Args:
            saved: The run, whose weights were assigned already; None forgets one that was read before.
            skipped: Variables that were left out.
        """
        saved = saved and dataclasses.replace(saved, skipped=skipped)
        if self._run is None or saved is None:
            self.waiting.take(saved)
            self._adopt_waiting()
            return
        state = self._continued(self._run.loop.state, saved)
        if state is not None:
            self._run.loop.state = state
            self._run.progress.take(saved.cursor)
            self._run.optimizer.take_rates(saved.learning_rates)
            self.seed = saved.seed

    def _adopt_waiting(self) -> None:
        variables = self.given_variables if self.variables is None else self.variables
        if self.compiled is not None and self.waiting.adopt(self.compiled.optimizer, self.view, variables):
            self.seed = self.waiting.seed

    def _continued(self, state: TrainState, saved: SavedRun) -> TrainState | None:
        trainer = self.trainer(None)
        empty = windowed_state(state.replace(accumulator=None), trainer)
        return saved.onto(empty, self.view, trainer.accumulation)

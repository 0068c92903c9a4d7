"""A run that was read from a file and that no fit has gone on with yet.

Entry point: `WaitingRun`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from dew.placement.stacks import StackView
from dew_keras.layer_arrays import layer_shapes, shapes_of
from dew_keras.optimizers import CompiledOptimizer
from dew_keras.progress import Cursor, Progress
from dew_keras.run_state import SavedRun


class WaitingRun:
    """Keeps what cannot be placed before masters and optimizer state are made, on the host.

    Attributes:
        run: The run, or None.
    """

    def __init__(self) -> None:
        self.run: SavedRun | None = None
        self._cursor: Cursor | None = None

    def take(self, run: SavedRun | None) -> None:
        """Keep a run in place of one that was read before.

        Args:
            run: The run; None forgets the one before.
        """
        self.run, self._cursor = run, None if run is None else run.cursor

    def forget_variables(self) -> None:
        """Drop the file's weights, because others were assigned."""
        if self.run is not None:
            self.run = dataclasses.replace(self.run, exact_variables={})

    @property
    def seed(self) -> int:
        """What the run shuffles arrays by."""
        assert self.run is not None, "asked while a run waits"
        return self.run.seed

    def adopt(self, optimizer: CompiledOptimizer, view: StackView, variables: Any) -> bool:
        """Show the run's learning rate, or drop the run, after a warning, when it is another optimizer's.

        Args:
            optimizer: The compiled optimizer.
            view: How the model stores layers.
            variables: The model's variables, or host arrays of their shapes.

        Returns:
            Whether a run of this optimizer waits.
        """
        if self.run is None:
            return False
        slots = jax.eval_shape(optimizer.build(view).init, shapes_of(variables["params"]))
        if not self.run.matches(layer_shapes(slots, view)):
            self.take(None)
            return False
        optimizer.take_rates(self.run.learning_rates)
        return True

    def begin(self) -> tuple[SavedRun | None, Progress]:
        """Say what a fit that begins goes on with; `take(None)` when it does.

        Returns:
            The run, and the fit's place in its data.
        """
        return self.run, Progress(self._cursor)

    def offer(self, cursor: Cursor | None) -> None:
        """Keep the place of a run that a state has gone on with, for the first fit that trains on a batch.

        Args:
            cursor: The place, or None.
        """
        self._cursor = cursor

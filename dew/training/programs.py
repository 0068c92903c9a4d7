"""The compiled programs of a run: one batch, several batches in one loop, an evaluation.

Entry point: `StepPrograms`. Every program is traced once per batch shape and consumes the state it is given.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dew.objectives.base import Objective
from dew.training.optimizer import Optimizer
from dew.training.state import TrainState
from dew.training.step import (
    Statistics,
    StepFunction,
    accumulate_step,
    commit_step,
    evaluation_step,
    update_step,
)


class StepPrograms:
    """The steps of one objective, one optimizer and one mesh.

    Args:
        objective: What is trained.
        optimizer: An optax transformation.
        mesh: The mesh.
        shardings: Where every array of the state lives.
        accumulation: Batches per update.
        step: A step to run in place of the engine's own, as `update_step` gives it; None for the engine's.
        is_eager: Run operation by operation instead of compiling, for debugging.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        *,
        mesh: Mesh,
        shardings: TrainState,
        accumulation: int = 1,
        step: StepFunction | None = None,
        is_eager: bool = False,
    ):
        self._objective, self._optimizer = objective, optimizer
        self._shardings, self._accumulation, self._is_eager = shardings, accumulation, is_eager
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._given = step

    def one(self, state: TrainState, batch: Any, microstep: int) -> tuple[TrainState, Statistics, jax.Array]:
        """Run the step of one batch.

        Args:
            state: The state; consumed.
            batch: A batch on the mesh.
            microstep: Batches in the open window.

        Returns:
            The next state, the batch's statistics and whether an update was applied.
        """
        return self._run(self.of_microstep(microstep), state, batch)

    def of_microstep(self, microstep: int) -> Any:
        """Return the program that a batch of a window runs.

        Args:
            microstep: Batches in the open window.
        """
        if self._accumulation == 1:
            return self._update
        return self._commit if microstep + 1 == self._accumulation else self._accumulate

    def several(self, state: TrainState, batches: Any, count: int) -> tuple[TrainState, Statistics, jax.Array]:
        """Run the steps of several batches as one program, which serves any number of them up to its room.

        Args:
            state: The state; consumed.
            batches: Batches on the mesh, stacked: [room, rows, ...].
            count: How many of them to run, the first ones.

        Returns:
            The next state; statistics and whether an update was applied, stacked where more than one batch ran.
        """
        state, statistics, applied = self._run(self._loop, state, batches, np.int32(count))
        if count < len(jax.tree.leaves(batches)[0]):
            own = 0 if count == 1 else slice(count)
            statistics, applied = jax.tree.map(lambda stacked: stacked[own], (statistics, applied))
        return state, statistics, applied

    def evaluate(self, variables: Any, batch: Any, key: jax.Array) -> Statistics:
        """Score a batch without training.

        Args:
            variables: All collections.
            batch: A batch on the mesh.
            key: Raw data of a random key.
        """
        with jax.disable_jit(self._is_eager):
            return self._evaluation(variables, batch, key)

    def _run(self, program: Any, state: TrainState, *inputs: Any) -> tuple[TrainState, Statistics, jax.Array]:
        if not self._is_eager:
            return program(state, *inputs)
        with jax.disable_jit():
            state, statistics, applied = program(state, *inputs)
        # What is not compiled ignores the shardings of its results.
        return jax.device_put(state, self._shardings), statistics, applied

    @functools.cached_property
    def _update(self) -> Any:
        return self._compiled(self._update_step)

    @functools.cached_property
    def _accumulate(self) -> Any:
        return self._compiled(self._accumulate_step)

    @functools.cached_property
    def _commit(self) -> Any:
        return self._compiled(self._commit_step)

    @property
    def _update_step(self) -> StepFunction:
        if self._given is not None:
            return self._given
        return update_step(self._objective, self._optimizer, self._shardings.params)

    @property
    def _accumulate_step(self) -> StepFunction:
        return accumulate_step(self._objective, self._optimizer, self._shardings.params)

    @property
    def _commit_step(self) -> StepFunction:
        return commit_step(self._objective, self._optimizer, self._shardings.params)

    @functools.cached_property
    def _loop(self) -> Any:
        step = self._update_step
        if self._accumulation > 1:
            accumulate, commit = self._accumulate_step, self._commit_step

            def step(state: TrainState, batch: Any) -> Any:
                closes = state.microstep + 1 == self._accumulation
                return jax.lax.cond(closes, commit, accumulate, state, batch)

        def run(state: TrainState, batches: Any, count: jax.Array) -> tuple[TrainState, Statistics, jax.Array]:
            room = len(jax.tree.leaves(batches)[0])

            def body(index: jax.Array, carry: Any) -> Any:
                state, stacked = carry
                state, *numbers = step(state, jax.tree.map(lambda leaf: leaf[index], batches))
                stacked = jax.tree.map(lambda all_, own: all_.at[index].set(own), stacked, numbers)
                return jax.lax.with_sharding_constraint(state, self._shardings), stacked

            first = jax.tree.map(lambda leaf: leaf[0], batches)
            _, *shapes = jax.eval_shape(step, state, first)
            stacked = jax.tree.map(lambda shape: jnp.zeros((room, *shape.shape), shape.dtype), shapes)
            # A scan would run all of its room: what is left of an epoch would need a program of its own.
            state, (statistics, applied) = jax.lax.fori_loop(0, count, body, (state, stacked))
            return state, statistics, applied

        return self._compiled(run)

    @functools.cached_property
    def _evaluation(self) -> Any:
        step = evaluation_step(self._objective)

        def run(variables: Any, batch: Any, key: jax.Array) -> Statistics:
            return step(variables, batch, jax.random.wrap_key_data(key))

        return jax.jit(run, out_shardings=self._whole)

    def _compiled(self, step: Any) -> Any:
        return jax.jit(step, donate_argnums=0, out_shardings=(self._shardings, self._whole, self._whole))

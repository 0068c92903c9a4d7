"""Train an objective on a mesh: shardings, placement, compiled steps, and the run around them.

Entry point: `Trainer`. Construction opens and allocates nothing; everything is traced under the
trainer's mesh and layout rules.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dew.checkpoint.save import Checkpoints
from dew.nn.backbones.staging import refuse_unscheduled
from dew.objectives.base import Objective, Ratio
from dew.parallel.stages import microbatched_into, refuse_unstaged
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, as_mesh, microbatches_of, stages_of
from dew.placement.partition import WholeBatch, batch_argument, batch_sharding, data_partition, shard_batch
from dew.placement.processes import is_primary
from dew.placement.stacks import StackView, stack_view
from dew.training.evaluate import pooled_statistics
from dew.training.initialise import initialise
from dew.training.loop import Loop
from dew.training.optimizer import Optimizer, as_optimizer
from dew.training.placing import abstract_state, check_alive, place_variables, plain, state_shardings
from dew.training.programs import StepPrograms
from dew.training.report import Report
from dew.training.resume import restore_state, saved_items
from dew.training.router_bias import with_router_biases
from dew.training.state import TrainState, new_state
from dew.training.step import StepFunction


class Trainer:
    """One objective, one optimizer, one mesh.

    Args:
        objective: What is trained.
        optimizer: A name or any optax transformation; see `make_optimizer`.
        key: Seed of the run: initial values, dropout.
        mesh: A `MeshSpec`, a mapping of its fields, a mesh, or None for all devices on data.
        layout: Where arrays live; None takes the default rules.
        microbatches: Microbatches of a pipeline; None takes those of the `MeshSpec`, or one per stage. A built mesh
            with stages does not say it, and needs it.
        accumulation: Batches per optimizer update; their totals and masses are summed and
            divided once.
        checkpoints: Where runs are saved and resumed from; None saves nothing.
        step: A pure function of (state, batch) that gives the next state, ratios by name and whether an update was
            applied, in place of the engine's own step; None for that one.
        carry: Arrays that such a step hands on in `TrainState.carry`; a checkpoint does not keep them.
        is_eager: Run operation by operation instead of compiling, so that prints and debuggers see values.

    Raises:
        ValueError: If the optimizer's name is unknown, `accumulation` is not positive, a step of your own is to be
            accumulated, the schedule of a pipeline cannot train the objective, or `microbatches` is missing or has no
            stages.
        LayoutRefused: If the mesh has stages that the module's layers do not divide into.
        TypeError: If `optimizer` is neither a name nor an optax transformation.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: str | Optimizer,
        *,
        key: int = 0,
        mesh: Mesh | MeshSpec | Mapping[str, int] | None = None,
        layout: Layout | None = None,
        microbatches: int | None = None,
        accumulation: int = 1,
        checkpoints: Checkpoints | None = None,
        step: StepFunction | None = None,
        carry: Any = None,
        is_eager: bool = False,
    ):
        if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
            raise ValueError(f"accumulation must be a positive integer. Received: accumulation={accumulation!r}.")
        if step is not None and accumulation > 1:
            raise ValueError(
                f"A step of your own applies its updates itself: use accumulation=1. Received: {accumulation=}."
            )
        stages, by_token_loss = stages_of(mesh), getattr(objective, "trains_by_token_loss", False)
        refuse_unstaged(stages, objective.module)
        refuse_unscheduled(objective.module, stages, None if by_token_loss else f"objective={type(objective).__name__}")
        self.objective = objective
        self.optimizer = with_router_biases(as_optimizer(optimizer), objective.module)
        self.key = key
        self.layout = Layout() if layout is None else layout
        self.accumulation = accumulation
        self.checkpoints = checkpoints
        self._mesh_given, self._microbatches = mesh, microbatches_of(mesh, microbatches)
        self._step, self._carry, self._is_eager = step, carry, is_eager

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh, built over the visible devices when first asked for.

        Raises:
            ValueError: If its factors do not divide the devices.
        """
        return as_mesh(self._mesh_given)

    @property
    def microbatches(self) -> int:
        """How many microbatches a pipeline cuts each device's rows into; 1 without stages."""
        return self._microbatches

    @property
    def stacks(self) -> StackView:
        """How the objective's module stores its layers."""
        return stack_view(self.objective.module)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Enter the mesh and the rules that everything is traced under."""
        rules = nn.logical_axis_rules(self.layout.rules)
        with jax.set_mesh(self.mesh), rules, microbatched_into(self.microbatches):
            yield

    def abstract_variables(self) -> Any:
        """Return the shapes of the objective's variables, boxed with their declared axes."""
        return self._abstract_variables

    def shardings(self) -> TrainState:
        """Return where every array of the state lives.

        Returns:
            A state of NamedShardings.

        Raises:
            LayoutRefused: If the layout leaves too much whole on this mesh.
        """
        return self._shardings

    def place(self, variables: Any = None) -> TrainState:
        """Make the state of a run on the mesh, or restore it where the run has a checkpoint.

        Args:
            variables: Values to train from, unboxed, in the module's structure. Arrays that
                already live where they belong are not copied: the steps consume them. None
                initialises under jit, each device making only its part.

        Returns:
            The state.

        Raises:
            LayoutRefused: If the layout leaves too much whole on this mesh.
            ValueError: If a value is missing, unknown or has another shape, or was consumed by another run.
        """
        restored = self.restore()
        return self._fresh(variables) if restored is None else restored[0]

    def restore(self) -> tuple[TrainState, Any] | None:
        """Read the run's latest checkpoint onto this mesh.

        Returns:
            The state and the position of its data, or None when there is no checkpoint.

        Raises:
            ValueError: If it was saved in the middle of a window of another length, or by a model or
                optimizer of another structure.
        """
        if self.checkpoints is None or self.checkpoints.latest() is None:
            return None
        state, position = restore_state(
            self.checkpoints, self._abstract_state, self._shardings, self.stacks, self.accumulation
        )
        return self._with_carry(state), position

    def save(self, state: TrainState, position: Any = None) -> None:
        """Start saving a state; the write goes on in the background.

        Args:
            state: A state between two steps.
            position: Position of the data that follows, JSON or bytes.

        Raises:
            ValueError: If the trainer has no checkpoints.
        """
        if self.checkpoints is None:
            raise ValueError("This trainer has no checkpoints. Build it with checkpoints=Checkpoints(directory).")
        tree, facts = saved_items(state, self.accumulation)
        self.checkpoints.save(int(state.step), tree, stacks=self.stacks, facts=facts, position=position)

    def loop(self, state: TrainState, *, nonfinite_limit: int | None = 5) -> Loop:
        """Begin a training loop.

        Args:
            state: What `place` returned; the loop owns it from here.
            nonfinite_limit: Stop after this many consecutive losses that are not finite.
        """
        return Loop(
            self._start, self._placed_state, state, accumulation=self.accumulation, nonfinite_limit=nonfinite_limit
        )

    def evaluate(self, variables: Any, batches: Iterable[Mapping[str, Any]]) -> dict[str, Ratio]:
        """Score held-out batches; one total over one mass for the pass.

        Args:
            variables: All collections, as in `TrainState.variables`.
            batches: Host batches.

        Returns:
            Host ratios by name, "loss" among them.

        Raises:
            ValueError: If there are no batches or one cannot be scored.
        """
        return pooled_statistics(functools.partial(self.score, variables), batches)

    def score(self, variables: Any, batch: Mapping[str, Any]) -> dict[str, Ratio]:
        """Start scoring one held-out batch.

        Args:
            variables: All collections, as in `TrainState.variables`.
            batch: A host batch.

        Returns:
            Its ratios by name, on the device and usually not done yet.

        Raises:
            ValueError: If the batch cannot be scored.
        """
        check_alive(variables)
        placed = self.place_batch(batch, train=False)
        with self.context():
            return self._programs.evaluate(variables, placed, self._evaluation_key)

    def place_batch(self, batch: Mapping[str, Any], *, train: bool = True) -> dict[str, jax.Array]:
        """Prepare a host batch and split its rows, and positions, over the mesh.

        Args:
            batch: A host batch as the objective's `prepare` reads it; a `WholeBatch` is not split.
            train: Whether it is trained on.

        Raises:
            ValueError: If its rows do not divide, or the objective refuses it.
            LayoutRefused: If some layer cannot compute rows of that length on the mesh.
        """
        return shard_batch(self.mesh, _like(batch, self._prepared(batch, train)), microbatches=self.microbatches)

    def _prepared(self, batch: Mapping[str, Any], train: bool = True) -> dict[str, Any]:
        """Prepare a host batch; rows that the mesh cannot compute are refused here, not while a program is traced."""
        prepared = self.objective.prepare(batch)
        check = getattr(self.objective, "check_rows", None)
        if check is not None:
            with nn.logical_axis_rules(self.layout.rules):
                check(self.mesh, prepared, train=train)
        return prepared

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Trace the training step for the shapes of a batch, without making or running anything.

        Args:
            batch: A host batch as the objective's `prepare` reads it; a `WholeBatch` is not split.

        Returns:
            The lowered step; its `compile()` tells the memory and the collectives it takes.

        Raises:
            ValueError: If the objective refuses the batch.
            LayoutRefused: If the layout leaves too much whole on this mesh, or a layer cannot compute the rows there.
        """
        is_whole = isinstance(batch, WholeBatch)
        count = 1 if is_whole else data_partition(self.mesh).count

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            place = NamedSharding(self.mesh, PartitionSpec()) if is_whole else batch_sharding(self.mesh, leaf.shape)
            return jax.ShapeDtypeStruct((leaf.shape[0] * count, *leaf.shape[1:]), leaf.dtype, sharding=place)

        state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self._abstract_state,
            self._shardings,
        )
        step = self._programs.of_microstep(self.accumulation - 1)
        with self.context():
            return step.lower(state, jax.tree.map(shape, self._prepared(batch)))

    def fit(
        self,
        dataset: Any,
        *,
        steps: int,
        variables: Any = None,
        log_every: int = 100,
        eval_every: int | None = None,
        checkpoint_every: int | None = None,
        write: Callable[[str], Any] | None = print,
    ) -> TrainState:
        """Train until the run has consumed `steps` batches, resuming where it was saved.

        Args:
            dataset: A `Dataset`.
            steps: Batches of the whole run, those before a resume included.
            variables: Values to begin from when nothing was saved; see `place`.
            log_every: Steps per printed line.
            eval_every: Steps between passes over the validation data; None never.
            checkpoint_every: Steps between checkpoints; None saves at the end only.
            write: Takes each line in the first process; None prints nothing.

        Returns:
            The final state.

        Raises:
            ValueError: If the data is empty, an interval reads or saves nothing, or a batch is refused.
            LayoutRefused: If the layout leaves too much whole on this mesh.
            NonFiniteLossError: After 5 consecutive losses that are not finite.
        """
        self._check_run(dataset, steps, eval_every, checkpoint_every)
        report = Report(self.objective.report, every=log_every, total=steps, write=write if is_primary() else None)
        restored = self.restore()
        state, position = (self._fresh(variables), None) if restored is None else restored
        first = int(state.step)
        if first >= steps:
            return state
        partition = data_partition(self.mesh)
        stream = iter(dataset.train(partition))
        if position is not None:
            stream.set_state(position)
        loop = self.loop(state)
        del state  # the first step consumes it
        step = saved = first
        for result in loop.run(itertools.islice(stream, steps - first)):
            step = result.step
            report.add(result)
            if eval_every and step % eval_every == 0:
                held_out = self.evaluate(loop.state.variables, dataset.val(partition))
                report.note("validation", step, held_out)
            if checkpoint_every and step % checkpoint_every == 0:
                self.save(loop.state, position_of(stream))
                saved = step
        report.finish()
        self._finish_run(loop, stream, step, saved, steps)
        return loop.state

    def _check_run(self, dataset: Any, steps: int, eval_every: int | None, checkpoint_every: int | None) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1. Received: steps={steps}.")
        if dataset.records == 0:
            raise ValueError("The data set is empty: records=0. Give at least one batch of rows.")
        for name, interval in (("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
            if interval is not None and interval < 1:
                raise ValueError(f"{name} must be at least 1 or None. Received: {name}={interval}.")
        if eval_every is not None and dataset.val is None:
            raise ValueError(f"eval_every={eval_every} needs validation data; the data set has none (val=None).")
        if checkpoint_every is not None and self.checkpoints is None:
            raise ValueError(
                f"checkpoint_every={checkpoint_every} needs a place to save. Build the trainer with "
                "checkpoints=Checkpoints(directory)."
            )

    def _finish_run(self, loop: Loop, stream: Any, step: int, saved: int, steps: int) -> None:
        if step == 0:
            raise ValueError("The data set is empty: it gave no batch. Give at least one batch of rows.")
        if step < steps:
            warnings.warn(f"The data ended after {step} of {steps} steps; the run stops there.", stacklevel=3)
        if self.checkpoints is not None:
            if saved != step:
                self.save(loop.state, position_of(stream))
            self.checkpoints.wait()

    @functools.cached_property
    def _abstract_variables(self) -> Any:
        with self.context():
            return jax.eval_shape(self.objective.init, jax.random.key(0))

    @functools.cached_property
    def _abstract_state(self) -> TrainState:
        state = abstract_state(plain(self._abstract_variables), self.optimizer, self.accumulation)
        return state.replace(carry=jax.eval_shape(lambda: self._carry))

    @functools.cached_property
    def _shardings(self) -> TrainState:
        variables = self.layout.shardings(self.mesh, self._abstract_variables)
        self.layout.check(self.mesh, self._abstract_variables, variables, self.stacks)
        return state_shardings(self.layout, self.mesh, self._abstract_state, variables)

    def _fresh(self, variables: Any) -> TrainState:
        shardings = self._shardings
        seed = jax.random.key(self.key)
        with self.context():
            if variables is None:
                init, key = self.objective.init, jax.random.fold_in(seed, 0)
                variables = initialise(init, key, self._abstract_variables, shardings.variables, self.mesh)
            else:
                variables = place_variables(variables, self._abstract_state.variables, shardings.variables)
            rest = self._make_rest(variables["params"], jax.random.key_data(jax.random.fold_in(seed, 1)))
            return self._with_carry(rest.replace(variables=variables))

    def _with_carry(self, state: TrainState) -> TrainState:
        """Give a state the first value of what a step of the user's own hands on."""
        return state.replace(carry=jax.tree.map(jnp.array, self._carry))

    @functools.cached_property
    def _make_rest(self) -> Any:
        """Compile the function that makes all of a state but its variables."""

        def rest(params: Any, key: jax.Array) -> TrainState:
            state = new_state({"params": params}, self.optimizer, key, accumulation=self.accumulation)
            # A copy, or an optimizer that keeps the parameters would share their donated memory.
            return jax.tree.map(jnp.copy, state.replace(variables={}))

        return jax.jit(rest, out_shardings=self._shardings.replace(variables={}, carry=None))

    def _placed_state(self, state: TrainState) -> TrainState:
        """Move the leaves of an assigned state that are not where the steps expect them."""

        def move(leaf: Any, sharding: NamedSharding) -> Any:
            return leaf if getattr(leaf, "sharding", None) == sharding else jax.device_put(leaf, sharding)

        return jax.tree.map(move, state, self._shardings)

    def _start(
        self, state: TrainState, batches: Sequence[Mapping[str, Any]], microstep: int, room: int
    ) -> tuple[TrainState, dict[str, Ratio], jax.Array]:
        if room == 1:
            place = shard_batch if self._is_eager else batch_argument
            alone = _like(batches[0], self._prepared(batches[0]))
            argument = place(self.mesh, alone, microbatches=self.microbatches)
            with self.context():
                return self._programs.one(state, argument, microstep)
        prepared = [self._prepared(batch) for batch in batches]
        filled = prepared + prepared[-1:] * (room - len(prepared))
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *filled)
        stacked = _like(batches[0], stacked)
        placed = shard_batch(self.mesh, stacked, is_stacked=True, microbatches=self.microbatches)
        with self.context():
            return self._programs.several(state, placed, len(batches))

    @functools.cached_property
    def _programs(self) -> StepPrograms:
        return StepPrograms(
            self.objective,
            self.optimizer,
            mesh=self.mesh,
            shardings=self._shardings,
            accumulation=self.accumulation,
            step=self._step,
            is_eager=self._is_eager,
        )

    @functools.cached_property
    def _evaluation_key(self) -> jax.Array:
        return jax.random.key_data(jax.random.key(self.key))


def _like(batch: Mapping[str, Any], prepared: dict[str, Any]) -> dict[str, Any]:
    return WholeBatch(prepared) if isinstance(batch, WholeBatch) else prepared


def position_of(stream: Any) -> Any:
    """Ask a batch iterator where it is.

    Args:
        stream: A batch iterator.

    Returns:
        The state of its `get_state`, JSON or bytes.

    Raises:
        ValueError: If it cannot say, so that a run saved now could not resume its data.
    """
    get_state = getattr(stream, "get_state", None)
    if get_state is None:
        raise ValueError(
            f"A run with checkpoints needs batch iterators with get_state and set_state; {type(stream).__name__} has "
            "none. Use dew.Dataset.from_records or add them."
        )
    return get_state()

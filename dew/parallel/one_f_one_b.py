"""1F1B: each microbatch runs backward as soon as it is scored, so the memory of a step does not grow with their number.

Entry point: `scheduled_loss` (https://arxiv.org/abs/1806.03377, section 3.2), which follows a timetable. Stages tick in
lockstep, idle ones on zeros: branches that differ between stages deadlock where the partitioner puts a collective into
one. A stage keeps the inputs of the microbatches on their way, and runs forward again from them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dew.arrays import Array, Float
from dew.parallel.gpipe import through_stages
from dew.parallel.schedules import IDLE, Timetable
from dew.parallel.stages import Pipeline


@dataclasses.dataclass(frozen=True)
class StagedModel:
    """The pure functions of a model that scores inside its schedule.

    `outer` is what is not a stage's, as `prepare` gives it: tables, last norm, head. `given` is what a batch says of
    its rows' tokens.

    Attributes:
        prepare: Weights outside the stages -> `outer`, once a step.
        embed: (outer, given) -> activations [rows, T, D].
        stage: (one stage's weights, activations, given) -> (activations, sums over the tokens).
        extra: (these sums of all stages and microbatches) -> what they add to the total, a linear function.
        score: (outer, activations, given) -> (total, further sums), the total a scalar to differentiate.
        pinned: (outer, weights of all stages) -> the same, where they live; for the sums of gradients.
        scaled: (gradients, the total's cotangent) -> the gradients times it.
    """

    prepare: Callable[[Any], Any]
    embed: Callable[[Any, Any], Array]
    stage: Callable[[Any, Array, Any], tuple[Array, Any]]
    extra: Callable[[Any], Array | float]
    score: Callable[[Any, Array, Any], tuple[Array, Any]]
    pinned: Callable[[Any, Any], tuple[Any, Any]]
    scaled: Callable[[Any, Array], Any]


def scheduled_loss(
    pipeline: Pipeline, model: StagedModel, table: Timetable, outer: Any, weights: Any, given: Any
) -> tuple[Float[Array, ""], tuple[Any, Any]]:
    """Score a batch; differentiated, compute its gradients in the order of the schedule.

    Bytes of the results on one device, with activations of a bytes a microbatch: each of M + S - 1 ticks hands a to the
    next stage, and backward to the one before. What the last stage gives is scattered to be scored, and what the first
    gives backward for the embedding's gradient: (2 M + S - 1) a / S. Both are gathered after that, as (2 M + S - 1) a.

    Args:
        pipeline: The stages and microbatches.
        model: The model's functions.
        table: Who works on what when; a microbatch moves one stage a tick, and turns around at the last within one.
        outer: Weights outside the stages.
        weights: Weights of all stages, leaves `[stages, ...]`.
        given: Tree of arrays `[B, T]`.

    Returns:
        The total, differentiable with respect to `outer` and `weights`, and the further sums with those of the stages,
        leaves `[stages, ...]`.

    Raises:
        ValueError: If a device's rows do not divide into microbatches.
    """
    return _scheduled(pipeline, model, table, outer, weights, given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scheduled(
    pipeline: Pipeline, model: StagedModel, table: Timetable, outer: Any, weights: Any, given: Any
) -> tuple[Array, Any]:
    outer = model.prepare(outer)
    x, said = through_stages(pipeline, model.stage, weights, model.embed(outer, given), given)
    total, further = model.score(outer, x, given)
    return total + model.extra(said), (further, said)


def _forward(pipeline: Pipeline, model: StagedModel, table: Timetable, outer: Any, weights: Any, given: Any) -> Any:
    prepared, transposed = jax.vjp(model.prepare, outer)
    schedule = _Schedule(pipeline, model, table.slots, prepared, weights, jax.tree.map(pipeline.split, given))
    carry = schedule.start()
    slopes = schedule.slopes(carry["said"])
    for (runs_forward, runs_backward), ticks in _phases(table.forward, table.backward):
        tick = functools.partial(schedule.tick, slopes=slopes, runs_forward=runs_forward, runs_backward=runs_backward)
        carry, _ = jax.lax.scan(tick, carry, _Entries.of(table, ticks))
    by_outer, by_weights = jax.tree.map(
        lambda sums, own: sums.astype(own.dtype), carry["gradients"], (prepared, weights)
    )
    (total, further), said = carry["sums"], carry["said"]
    return (total + model.extra(said), (further, said)), (*transposed(by_outer), by_weights)


def _backward(
    pipeline: Pipeline, model: StagedModel, table: Timetable, gradients: Any, cotangents: tuple[Array, Any]
) -> Any:
    return *model.scaled(gradients, cotangents[0]), None


_scheduled.defvjp(_forward, _backward)


def _phases(forward: np.ndarray, backward: np.ndarray) -> list[tuple[tuple[bool, bool], np.ndarray]]:
    """Group the ticks by what any stage does in them: filling, steady state, draining."""
    does = [(bool(f), bool(b)) for f, b in zip((forward != IDLE).any(1), (backward != IDLE).any(1), strict=True)]
    grouped = itertools.groupby(range(len(does)), key=does.__getitem__)
    return [(kind, np.array(list(ticks), np.int32)) for kind, ticks in grouped]


class _Entries(NamedTuple):
    """What a timetable says of a tick.

    Attributes:
        slot: Where the stages' inputs are kept.
        forward: Microbatch of each stage, `IDLE` for none.
        backward: Likewise.
        read: Where each stage's input of its backward pass was kept.
    """

    slot: Array
    forward: Array
    backward: Array
    read: Array

    @classmethod
    def of(cls, table: Timetable, ticks: np.ndarray) -> "_Entries":
        """Take some ticks of a timetable."""
        slots = np.asarray(ticks % table.slots, np.int32)
        numbers = (slots, table.forward[ticks], table.backward[ticks], table.read_slots[ticks])
        return cls(*jax.lax.optimization_barrier(tuple(map(jnp.asarray, numbers))))  # see `Pipeline.after`


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """The ticks of one step.

    Attributes:
        pipeline: The stages and microbatches.
        model: The model's functions.
        slots: Places for kept inputs on a stage.
        outer: Weights outside the stages, prepared.
        weights: Weights of all stages.
        parts: What the microbatches say, leaves `[M, rows, T]`.
    """

    pipeline: Pipeline
    model: StagedModel
    slots: int
    outer: Any
    weights: Any
    parts: Any

    def slopes(self, said: Any) -> Any:
        """Give what the total gains from each sum of the stages, the same at every tick."""
        return jax.grad(lambda said: jnp.asarray(self.model.extra(said), jnp.float32))(said)

    def start(self) -> dict[str, Any]:
        """Make the values that the first tick is handed."""
        shapes = jax.eval_shape(self._shapes)
        x, sums, said = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        zeros = jnp.broadcast_to(x, (self.pipeline.stages, *x.shape))
        kept = jnp.broadcast_to(zeros, (self.slots, *zeros.shape))
        gradients = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), (self.outer, self.weights)
        )
        return {
            "handed": self.pipeline.pinned(zeros),
            "returned": self.pipeline.pinned(zeros),
            "kept": self.pipeline.pinned_slots(kept),
            "sums": sums,
            "said": said,
            "gradients": self.model.pinned(*gradients),
        }

    def tick(
        self,
        carry: dict[str, Any],
        entries: _Entries,
        *,
        slopes: Any,
        runs_forward: bool,
        runs_backward: bool,
    ) -> tuple[dict[str, Any], None]:
        """Run one tick on all stages: forward, then backward, each when what is before it is done."""
        entries, done = self.pipeline.after(entries, carry["handed"], carry["returned"]), None
        if runs_forward:
            carry, done = self._run_forward(carry, entries)
        if runs_backward:
            carry = self._run_backward(carry, done, entries, slopes)
        return carry, None

    def _run_forward(self, carry: dict[str, Any], entries: _Entries) -> tuple[dict[str, Any], Array]:
        pipeline, forward = self.pipeline, entries.forward
        first = self.model.embed(self.outer, self._part(forward[0]))
        x = pipeline.pinned(pipeline.at(0, first, carry["handed"]))
        kept = jax.lax.dynamic_update_index_in_dim(carry["kept"], x, entries.slot, 0)
        done, said = self._stages(self.weights, x, pipeline.taken(self.parts, forward))
        said = jax.tree.map(jnp.add, carry["said"], pipeline.of_working(forward, said))
        kept = pipeline.pinned_slots(kept)
        return carry | {"handed": pipeline.shifted(done, 1), "kept": kept, "said": said}, done

    def _run_backward(
        self, carry: dict[str, Any], done: Array | None, entries: _Entries, slopes: Any
    ) -> dict[str, Any]:
        pipeline, (by_outer, by_weights) = self.pipeline, carry["gradients"]
        forward = entries.forward
        arriving = carry["returned"]
        if done is not None:  # the last stage turns what it has just finished around
            forward = pipeline.after(forward, done)
            sums, by_scoring, last = self._scored(pipeline.from_stage(done, pipeline.stages - 1), forward[-1])
            carry = carry | {"sums": jax.tree.map(jnp.add, carry["sums"], sums)}
            by_outer = _added(by_outer, by_scoring)
            arriving = pipeline.at(pipeline.stages - 1, last, arriving)
        # Idle stages are handed zeros: nobody is behind the last stage, and what they compute from zeros is zero.
        arriving = pipeline.pinned(arriving)
        backward, read = pipeline.after((entries.backward, entries.read), arriving, carry["handed"])
        x = pipeline.picked(carry["kept"], read)
        inputs = pipeline.taken(self.parts, backward)
        _, transposed = jax.vjp(lambda weights, x: self._stages(weights, x, inputs), self.weights, x)
        by_stages, leaving = transposed((arriving, pipeline.of_working(backward, slopes)))
        leaving = pipeline.pinned(leaving)
        _, transposed = jax.vjp(lambda outer: self.model.embed(outer, self._part(backward[0])), self.outer)
        (by_embedding,) = transposed(pipeline.from_stage(leaving, 0))
        gradients = self.model.pinned(_added(by_outer, by_embedding), _added(by_weights, by_stages))
        return carry | {"returned": pipeline.shifted(leaving, -1), "gradients": gradients}

    def _scored(self, x: Array, microbatch: Array) -> tuple[Any, Any, Array]:
        """Score what left the last stage: the sums, the total's gradients by the outer weights and by `x`.

        All are zero where the stage was idle.
        """
        given, works = self._part(microbatch), microbatch >= 0
        total, transposed, further = jax.vjp(
            lambda outer, x: self.model.score(outer, x, given), self.outer, x, has_aux=True
        )
        by_outer, by_x = transposed(works.astype(total.dtype))
        return jax.tree.map(lambda leaf: jnp.where(works, leaf, 0), (total, further)), by_outer, by_x

    def _shapes(self) -> tuple[Array, Any, Any]:
        """Compute one microbatch's activation, its sums, and the sums of all stages; only their shapes are used."""
        stages = self.pipeline.stages
        x = self.model.embed(self.outer, self._part(jnp.int32(0)))
        inputs = self.pipeline.taken(self.parts, jnp.zeros(stages, jnp.int32))
        _, said = self._stages(self.weights, jnp.broadcast_to(x, (stages, *x.shape)), inputs)
        return x, self.model.score(self.outer, x, self._part(jnp.int32(0))), said

    def _stages(self, weights: Any, x: Array, inputs: Any) -> tuple[Array, Any]:
        x, said = self.pipeline.map(self.model.stage)(weights, x, inputs)
        return self.pipeline.pinned(x), said

    def _part(self, microbatch: Array) -> Any:
        """Give what one microbatch says; of an idle stage's, the first."""
        # Else what scores it, with positions split over tensor and stage, would split so what all stages read.
        return jax.tree.map(lambda leaf: self.pipeline.pinned_rows(leaf[jnp.maximum(microbatch, 0)]), self.parts)


def _added(sums: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, new: total + new.astype(total.dtype), sums, more)

"""What all pipeline schedules share: the stages of a mesh, a step's microbatches, and the hand-overs between stages.

Entry points: `Pipeline`, `current_pipeline`, `microbatched_into`, `refuse_unstaged`. Values of all stages are one array
`[stages, ...]` split over the stage axis; a stage's own work is mapped over that dimension. Bytes per device: a
hand-over sends the stage's activation once, `from_stage` scatters (S - 1) / S of one activation.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from dew.arrays import Array, Int, Shaped
from dew.parallel.schedules import IDLE
from dew.placement.layout import LayoutRefused
from dew.placement.mesh import batch_divisor
from dew.placement.rules import DEFAULT_RULES, STAGE, resolve

TOKEN_NAMES = ("activation_batch", "activation_length")
"""Logical names of a microbatch's leading dimensions; further ones are whole."""

_MAPPED = "stages"
"""Name of the dimension that `Pipeline.map` maps over; the mesh has an axis of the other name."""
_MICROBATCHES: contextvars.ContextVar[int | None] = contextvars.ContextVar("microbatches", default=None)


@contextlib.contextmanager
def microbatched_into(count: int) -> Iterator[None]:
    """Cut the batches of pipelines that are traced inside into this many microbatches.

    Args:
        count: Microbatches; results do not depend on it.
    """
    token = _MICROBATCHES.set(count)
    try:
        yield
    finally:
        _MICROBATCHES.reset(token)


def current_pipeline() -> "Pipeline | None":
    """Give the pipeline of the mesh in context (`jax.set_mesh`), or None where it has a single stage.

    A mesh does not say into how many microbatches a batch is cut: outside of `microbatched_into`, which the trainer
    and the facade enter, there are as many as stages.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape.get(STAGE, 1) == 1 or STAGE in mesh.manual_axes:
        return None
    return Pipeline(mesh, _MICROBATCHES.get() or mesh.shape[STAGE])


def refuse_unstaged(stages: int, module: Any) -> None:
    """Refuse a stage axis under a module whose layers do not pipeline.

    Args:
        stages: Stages of the mesh.
        module: A module; one that pipelines has a method `check_stages` of the number of stages.

    Raises:
        LayoutRefused: If the mesh has stages and the module has no stack, or one that does not divide into them.
    """
    if stages == 1:
        return
    check = getattr(module, "check_stages", None)
    if check is None:
        raise LayoutRefused(
            f"A mesh with stage={stages} pipelines a layer stack, and {type(module).__name__} has none: every stage "
            f"would compute the whole step. Use stage=1, or a CausalTransformer."
        )
    check(stages)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The stages of a mesh and the microbatches that pass them.

    Attributes:
        mesh: The abstract mesh in context.
        microbatches: Microbatches of a step.
    """

    mesh: Any
    microbatches: int

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.mesh.shape[STAGE]

    def split(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "M rows ..."]:
        """Cut rows into microbatches: the m-th takes rows m, m + M, ..., so that no row changes its device.

        Raises:
            ValueError: If the rows of a device do not divide into microbatches.
        """
        self.check_rows(x.shape[0])
        return x.reshape(x.shape[0] // self.microbatches, self.microbatches, *x.shape[1:]).swapaxes(0, 1)

    def join(self, x: Shaped[Array, "M rows ..."]) -> Shaped[Array, "B ..."]:
        """Put the rows of microbatches back into their order."""
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def check_rows(self, rows: int) -> None:
        """Refuse a batch whose rows do not divide."""
        divisor = batch_divisor(self.mesh, self.microbatches)
        if rows % divisor:
            raise ValueError(
                f"A pipeline of microbatches={self.microbatches} over {divisor // self.microbatches} row shards needs "
                f"a batch of a multiple of {divisor} rows. Received: {rows} rows."
            )

    def map(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        """Run a function of one stage on every stage; all its arguments and results gain a leading `[stages]`."""
        # Not a shard_map over stage alone: inside one, the partitioner of the other axes ends the process at some
        # gathers, and a layer's own shard_map over all axes could not be nested.
        return jax.vmap(stage, axis_name=_MAPPED, spmd_axis_name=STAGE)

    def stage_number(self) -> Int[Array, ""]:
        """Say inside a function that `map` runs which stage it runs for."""
        return jax.lax.axis_index(_MAPPED)

    def by_stage(self, weights: Any) -> Any:
        """View banks `[L, ...]` as `[stages, L / stages, ...]`; every device keeps the layers it holds."""
        return jax.tree.map(lambda leaf: leaf.reshape(self.stages, -1, *leaf.shape[1:]), weights)

    def pinned(self, x: Shaped[Array, "stages rows T ..."]) -> Shaped[Array, "stages rows T ..."]:
        """Keep each stage's activation on that stage, its rows and positions where the rules put them."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self._spec(x.shape)))

    def pinned_slots(self, x: Shaped[Array, "slots stages rows T ..."]) -> Shaped[Array, "slots stages rows T ..."]:
        """Keep activations that a stage has put by where `pinned` keeps one."""
        spec = PartitionSpec(None, *self._spec(x.shape[1:]))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def pinned_rows(self, x: Shaped[Array, "rows T ..."]) -> Shaped[Array, "rows T ..."]:
        """Keep what is of no stage where `pinned` keeps each stage's."""
        spec = PartitionSpec(*self._spec((self.stages, *x.shape))[1:])
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def picked(
        self, kept: Shaped[Array, "slots stages rows T D"], slots: Int[Array, "stages"]
    ) -> Shaped[Array, "stages rows T D"]:
        """Take on each stage the activation it has put by in a slot of its own choice."""
        spec = self._spec(kept.shape[1:])
        pick = lambda local, slot: jax.lax.dynamic_index_in_dim(local, slot[0], 0, keepdims=False)  # noqa: E731
        places = (PartitionSpec(None, *spec), PartitionSpec(STAGE))
        return jax.shard_map(pick, mesh=self.mesh, in_specs=places, out_specs=spec)(kept, slots)

    def taken(self, inputs: Any, microbatches: Int[Array, "stages"]) -> Any:
        """Give each stage the inputs of the microbatch it works on; an idle stage is given the first.

        Args:
            inputs: Tree of arrays `[M, rows, T]`.
            microbatches: Microbatch of each stage, negative for none.
        """
        chosen = jnp.maximum(microbatches, 0)
        return jax.tree.map(lambda leaf: self.pinned(jnp.take(leaf, chosen, axis=0)), inputs)

    def of_working(self, microbatches: Int[Array, "stages"], sums: Any) -> Any:
        """Keep the sums of stages that work on a microbatch; those of idle ones count for nothing."""
        works = microbatches >= 0
        return jax.tree.map(lambda leaf: jnp.where(works.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0), sums)

    def at(self, stage: int, inside: Any, elsewhere: Shaped[Array, "stages ..."]) -> Shaped[Array, "stages ..."]:
        """Put a value in place of one stage's: `inside` has no stage dimension."""
        is_here = (np.arange(self.stages) == stage).reshape(-1, *(1,) * (elsewhere.ndim - 1))
        return jnp.where(is_here, inside, elsewhere)

    def shifted(self, x: Shaped[Array, "stages rows T D"], by: int) -> Shaped[Array, "stages rows T D"]:
        """Hand every stage's value to the stage `by` further; what nobody hands to becomes zero."""
        pairs = [(stage, stage + by) for stage in range(self.stages) if 0 <= stage + by < self.stages]
        spec = self._spec(x.shape)
        move = lambda local: jax.lax.ppermute(local, STAGE, pairs)  # noqa: E731
        return jax.shard_map(move, mesh=self.mesh, in_specs=spec, out_specs=spec)(x)

    def after(self, numbers: Any, *activations: Shaped[Array, "stages rows T D"]) -> Any:
        """Give numbers of a timetable, all at least `IDLE`, once activations are there.

        Collectives that read by them then follow those that made the activations. XLA on CPU runs what does not depend
        on each other in any order, which may differ between devices: they would wait for each other for ever.

        Args:
            numbers: Tree of integer arrays, the same on every device.
            activations: Of all stages.
        """
        specs = tuple(self._spec(x.shape) for x in activations)

        def local(numbers: Any, *activations: Array) -> Any:
            first = jnp.sum(jnp.stack([x.reshape(-1)[0].astype(jnp.float32) for x in activations])).astype(jnp.int32)
            return jax.tree.map(lambda number: jnp.where(number >= IDLE, number, first), numbers)

        run = jax.shard_map(
            local, mesh=self.mesh, in_specs=(PartitionSpec(), *specs), out_specs=PartitionSpec(), check_vma=False
        )
        return run(numbers, *activations)

    def from_stage(self, x: Shaped[Array, "stages rows T D"], stage: int) -> Shaped[Array, "rows T D"]:
        """Give all devices one stage's value, positions split over the stages where they divide."""
        spec = self._spec(x.shape)
        rows, length = spec[1], spec[2]
        held = () if length is None else (length,) if isinstance(length, str) else tuple(length)
        shards = self.stages * int(np.prod([self.mesh.shape[axis] for axis in held]))
        scatters = x.shape[2] % shards == 0

        def move(local: Array) -> Array:
            own = jnp.where(jax.lax.axis_index(STAGE) == stage, local[0], jnp.zeros_like(local[0]))
            if scatters:
                return jax.lax.psum_scatter(own, STAGE, scatter_dimension=1, tiled=True)
            return jax.lax.psum(own, STAGE)

        out = PartitionSpec(rows, (*held, STAGE)) if scatters else PartitionSpec(rows, length)
        return jax.shard_map(move, mesh=self.mesh, in_specs=spec, out_specs=out)(x)

    def _spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Resolve where an array `[stages, rows, T, ...]` lives."""
        names = (*TOKEN_NAMES, *(None,) * (len(shape) - 3))
        found = resolve(names, shape[1:], self.mesh, nn.get_logical_axis_rules() or DEFAULT_RULES).spec
        return PartitionSpec(STAGE, *found, *(None,) * (len(shape) - 1 - len(found)))

"""GPipe: all microbatches forward through the stages, then all backward (https://arxiv.org/abs/1811.06965).

Entry point: `through_stages`. The backward pass is the transpose of the loop over M + S - 1 ticks. With a bytes for a
microbatch's activation on a device, a tick hands a to the next stage, and backward to the one before. Each takes its
M a / S of what leaves the last stage, gathered as M a backward; gradients of what enters are summed, a a tick.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.arrays import Array, Float
from dew.parallel.schedules import IDLE, gpipe_timetable
from dew.parallel.stages import Pipeline


def through_stages(
    pipeline: Pipeline,
    stage: Callable[..., tuple[Array, Any]],
    weights: Any,
    x: Float[Array, "B T D"],
    inputs: Any,
) -> tuple[Float[Array, "B T D"], Any]:
    """Run a batch through a pipelined layer stack.

    Args:
        pipeline: The stages and microbatches.
        stage: Function of (one stage's weights, activations [rows, T, D], that microbatch's inputs) giving activations
            and a tree of sums over the microbatch's tokens, empty where there is nothing to say.
        weights: Weights of all stages, leaves `[stages, ...]`.
        x: What the first stage reads.
        inputs: Tree of arrays `[B, T]` that every stage reads beside the activations.

    Returns:
        What the last stage gives, positions split over the stages where they divide; and each stage's sums over all
        microbatches, leaves `[stages, ...]`.

    Raises:
        ValueError: If a device's rows do not divide into microbatches.
    """
    table = gpipe_timetable(pipeline.stages, pipeline.microbatches)
    entries = jnp.asarray(table.forward[: table.forward_ticks])
    run, parts = pipeline.map(stage), jax.tree.map(pipeline.split, inputs)
    entering = pipeline.split(x)
    # The last microbatch enters before it has passed all stages; what enters after it is never read.
    filling = jnp.zeros((len(entries) - pipeline.microbatches, *entering.shape[1:]), x.dtype)

    def tick(handed: Array, given: tuple[Array, Array]) -> tuple[Array, tuple[Array, Any]]:
        microbatches, first = given
        state = pipeline.pinned(pipeline.at(0, first, handed))
        done, said = run(weights, state, pipeline.taken(parts, microbatches))
        done = pipeline.pinned(done)
        return pipeline.shifted(done, 1), (done, pipeline.of_working(microbatches, said))

    start = jnp.zeros((pipeline.stages, *entering.shape[1:]), x.dtype)
    _, (done, said) = jax.lax.scan(tick, pipeline.pinned(start), (entries, jnp.concatenate([entering, filling])))
    finished = done[np.flatnonzero(table.forward[:, -1] != IDLE)[0] :]
    last = jax.vmap(lambda at_tick: pipeline.from_stage(at_tick, pipeline.stages - 1))(finished)
    return pipeline.join(last), jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), said)

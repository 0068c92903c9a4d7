"""1F1B follows its timetable: any in which microbatches move a stage a tick gives the gradients of the model."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.router import scaled_gradients
from dew.parallel.one_f_one_b import StagedModel, scheduled_loss
from dew.parallel.schedules import IDLE, Timetable, one_f_one_b_timetable
from dew.parallel.stages import Pipeline
from dew.placement.mesh import MeshSpec, build_mesh

ROWS, LENGTH, WIDTH, VOCAB = 32, 8, 4, 8


def embed(outer, given):
    return outer["table"][given["tokens"]]


def stage(weights, x, given):
    return jnp.tanh(x @ weights["kernel"]) + x, {"seen": jnp.sum(x[..., 0] * given["weights"])}


def score(outer, x, given):
    return jnp.sum((x @ outer["head"]) ** 2 * given["weights"][..., None]), (jnp.sum(given["weights"]),)


MODEL = StagedModel(
    prepare=lambda outer: outer,
    embed=embed,
    stage=stage,
    extra=lambda said: 0.3 * jnp.sum(said["seen"]),
    score=score,
    pinned=lambda outer, weights: (outer, weights),
    scaled=scaled_gradients,
)


def paused_timetable(num_stages: int, num_microbatches: int) -> Timetable:
    """Let a tick pass before every third microbatch enters; what follows keeps to 1F1B's order."""
    enters = np.arange(num_microbatches) + np.arange(num_microbatches) // 3
    ticks = int(enters[-1]) + 2 * num_stages - 1
    forward, backward = np.full((2, ticks, num_stages), IDLE, np.int32)
    for number, tick in enumerate(enters):
        for place in range(num_stages):
            forward[tick + place, place] = number
            backward[tick + 2 * (num_stages - 1) - place, place] = number
    return Timetable(forward, backward)


def on_one_device(outer, weights, given):
    x, seen = embed(outer, given), 0.0
    for kernel in weights["kernel"]:
        x, said = stage({"kernel": kernel}, x, given)
        seen += said["seen"]
    return score(outer, x, given)[0] + 0.3 * seen


def on_stages(stages):
    return jax.set_mesh(build_mesh(MeshSpec(stage=stages, fsdp=8 // stages)))


def in_schedule(timetable, microbatches, given):
    """The loss and its gradients on the mesh in context."""
    pipeline = Pipeline(jax.sharding.get_abstract_mesh(), microbatches)
    table = timetable(pipeline.stages, microbatches)
    total = lambda outer, weights: scheduled_loss(pipeline, MODEL, table, outer, weights, given)[0]  # noqa: E731
    return jax.value_and_grad(total, (0, 1))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("timetable", [one_f_one_b_timetable, paused_timetable])
def test_gradients_are_those_of_one_device_whatever_the_timetable(timetable, stages):
    generator = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(generator.normal(0, 0.5, shape), jnp.float32)  # noqa: E731
    outer = {"table": draw(VOCAB, WIDTH), "head": draw(WIDTH, 3)}
    weights = {"kernel": draw(stages, WIDTH, WIDTH)}
    given = {
        "tokens": jnp.asarray(generator.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32),
        "weights": jnp.abs(draw(ROWS, LENGTH)),
    }
    expected = jax.value_and_grad(on_one_device, (0, 1))(outer, weights, given)

    with on_stages(stages):
        found = jax.jit(in_schedule(timetable, 8, given))(outer, weights)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize("stages", [2, 4])
def test_the_compiled_step_carries_two_inputs_less_one_for_each_stage_whatever_the_microbatches(stages):
    outer = {"table": jnp.zeros((VOCAB, WIDTH)), "head": jnp.zeros((WIDTH, 3))}
    weights = {"kernel": jnp.zeros((stages, WIDTH, WIDTH))}
    rows, carried = 2, {}
    for microbatches in (4, 16):
        shape = (rows * microbatches * 8 // stages, LENGTH)
        given = {"tokens": jnp.zeros(shape, jnp.int32), "weights": jnp.ones(shape)}
        with on_stages(stages):
            text = jax.jit(in_schedule(one_f_one_b_timetable, microbatches, given)).lower(outer, weights).compile()
        loops = [line.split(" while(")[0] for line in text.as_text().splitlines() if " while(" in line]
        carried[microbatches] = {shape for loop in loops for shape in re.findall(r"f32\[[\d,]*\]", loop)}
    assert carried[4] == carried[16]
    activations = {shape for shape in carried[16] if shape.endswith(f",{LENGTH},{WIDTH}]")}
    of_stage = f"1,{rows},{LENGTH},{WIDTH}]"  # of all stages, the device's own
    one = f"f32[{rows},{LENGTH},{WIDTH}]"  # in a form that some compilers carry
    assert activations - {one} == {f"f32[{of_stage}", f"f32[{2 * stages - 1},{of_stage}"}

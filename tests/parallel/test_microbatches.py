"""Which rows are a microbatch: the m-th of M takes rows m, m + M, ... of each device, and no row changes its device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dew.nn.router import scaled_gradients
from dew.parallel.gpipe import through_stages
from dew.parallel.one_f_one_b import StagedModel, scheduled_loss
from dew.parallel.schedules import one_f_one_b_timetable
from dew.parallel.stages import current_pipeline, microbatched_into
from dew.placement.mesh import MeshSpec, build_mesh
from tools.collectives import collectives

ROWS, LENGTH, WIDTH = 24, 4, 8
MESH = MeshSpec(stage=2, fsdp=2)  # and data=2: six rows on a device


def company(given):
    """Count for every two rows whether they are here, [ROWS, ROWS]."""
    here = jnp.sum(jax.nn.one_hot(given["rows"][:, 0], ROWS), axis=0)
    return jnp.outer(here, here)


def stage(weights, x, given):
    return x * weights, company(given)


def gpipe(rows):
    pipeline = current_pipeline()
    x, weights = jnp.ones((ROWS, LENGTH, WIDTH)), jnp.ones(pipeline.stages)
    return [through_stages(pipeline, stage, weights, x, {"rows": rows})[1]]


def one_f_one_b(rows):
    pipeline = current_pipeline()
    model = StagedModel(
        prepare=lambda outer: outer,
        embed=lambda outer, given: outer * jnp.ones((*given["rows"].shape, WIDTH)),
        stage=stage,
        extra=lambda said: 0.0,
        score=lambda outer, x, given: (outer * jnp.sum(x), company(given)),
        pinned=lambda outer, weights: (outer, weights),
        scaled=scaled_gradients,
    )

    table = one_f_one_b_timetable(pipeline.stages, pipeline.microbatches)

    def loss(outer, weights):
        return scheduled_loss(pipeline, model, table, outer, weights, {"rows": rows})

    _, (of_scoring, of_stages) = jax.grad(loss, argnums=(0, 1), has_aux=True)(jnp.ones(()), jnp.ones(pipeline.stages))
    return [of_scoring[None], of_stages]


@pytest.mark.parametrize("microbatches", [1, 3, 6])
@pytest.mark.parametrize("run", [gpipe, one_f_one_b])
def test_microbatch_m_takes_rows_m_and_every_mth_after_it_and_passes_each_stage_once(run, microbatches):
    mesh, numbers = build_mesh(MESH), np.arange(ROWS)
    rows = np.broadcast_to(numbers[:, None], (ROWS, LENGTH))
    with jax.set_mesh(mesh), microbatched_into(microbatches):
        # A function of its own: jit would find the program of another number of microbatches.
        found = jax.jit(lambda rows: run(rows))(
            jax.device_put(rows, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        )
    want = (numbers[:, None] - numbers) % microbatches == 0
    for of_stages in found:
        for of_one in of_stages:
            np.testing.assert_array_equal(of_one, want)


def test_gradients_of_1f1b_are_those_of_the_formula_whatever_is_made_of_the_total():
    mesh, outer, weights = build_mesh(MESH), jnp.float32(1.5), jnp.array([0.5, 3.0])
    elements, rows = ROWS * LENGTH * WIDTH, jnp.zeros((ROWS, LENGTH), jnp.int32)

    def third(outer, weights):
        model = StagedModel(
            prepare=lambda outer: 2 * outer,
            embed=lambda outer, given: outer * jnp.ones((*given["rows"].shape, WIDTH)),
            stage=lambda weights, x, given: (x * weights, jnp.sum(x)),
            extra=lambda said: 0.125 * jnp.sum(said),
            score=lambda outer, x, given: (outer * jnp.sum(x), ()),
            pinned=lambda outer, weights: (outer, weights),
            scaled=scaled_gradients,
        )
        pipeline = current_pipeline()
        table = one_f_one_b_timetable(pipeline.stages, pipeline.microbatches)
        return scheduled_loss(pipeline, model, table, outer, weights, {"rows": rows})[0] / 3

    def formula(outer, weights):
        entering = 2 * outer
        said = entering + entering * weights[0]
        return elements * (entering * entering * weights[0] * weights[1] + 0.125 * said) / 3

    with jax.set_mesh(mesh), microbatched_into(3):
        got = jax.jit(jax.value_and_grad(third, (0, 1)))(outer, weights)
    want = jax.value_and_grad(formula, (0, 1))(outer, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_a_mesh_alone_cuts_rows_into_as_many_microbatches_as_it_has_stages():
    with jax.set_mesh(build_mesh(MESH)):
        assert current_pipeline().microbatches == 2
        with microbatched_into(3):
            assert current_pipeline().microbatches == 3


def test_no_row_changes_its_device():
    mesh, microbatches = build_mesh(MESH), 3
    whole, parts = (NamedSharding(mesh, PartitionSpec(*lead, ("data", "fsdp"))) for lead in ((), (None,)))
    x = jax.ShapeDtypeStruct((ROWS, LENGTH), np.float32, sharding=whole)
    with jax.set_mesh(mesh), microbatched_into(microbatches):
        pipeline = current_pipeline()
        cut = jax.jit(pipeline.split, out_shardings=parts).lower(x).compile()
        y = jax.ShapeDtypeStruct((microbatches, ROWS // microbatches, LENGTH), np.float32, sharding=parts)
        joined = jax.jit(pipeline.join, out_shardings=whole).lower(y).compile()
    assert collectives(cut.as_text(), dict(mesh.shape)) == collectives(joined.as_text(), dict(mesh.shape)) == []

"""A step on any mesh is the step on one device: loss, metrics, every gradient leaf, the updated weights."""

import functools

import jax
import numpy as np
import pytest

from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.training.optimizer import make_optimizer
from dew.training.step import batch_gradients
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

# Norm scales may not stay whole under tolerance=0, so a tensor mesh needs a rule for them too.
STRICT = Layout(rules=(*DEFAULT_RULES, ("norm", "tensor")), min_shard=1, tolerance=0)
MESHES = {
    "data=8": MeshSpec(),
    "fsdp=8": MeshSpec(fsdp=8),
    "tensor=4": MeshSpec(tensor=4),
    "fsdp=2 tensor=2": MeshSpec(fsdp=2, tensor=2),
}
RTOL = 1e-5


@functools.cache
def trainer(name: str | None, *, accumulation: int = 1, **fields) -> Trainer:
    module = tiny_decoder(layers=(tiny_layer(num_kv_heads=4),) * 4, **fields)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if name is None else build_mesh(MESHES[name])
    return Trainer(
        LanguageModel(module),
        # A large eps: Adam divides by the gradient's own size, which would magnify rounding where that is near 0.
        make_optimizer("adamw", 1e-2, clip_norm=1.0, eps=1e-2),
        mesh=mesh,
        layout=STRICT,
        accumulation=accumulation,
    )


@functools.cache
def scored(name: str | None, **fields) -> tuple[dict, dict]:
    """Give the statistics and gradients of one batch, on the host."""
    run = trainer(name, **fields)
    state = run.place()
    differentiate = jax.jit(batch_gradients(run.objective, run.shardings().params))
    with run.context():
        output, gradients = differentiate(state.variables, run.place_batch(tiny_batch(length=48)), jax.random.key(0))
    return jax.device_get({"loss": output.loss, **output.metrics}), named_leaves(jax.device_get(gradients))


def assert_close(got, want, what):
    scale = np.max(np.abs(want))
    assert scale > 0, f"{what} is zero: the test could not fail"
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * scale, err_msg=what)


@pytest.mark.parametrize("name, tie_embeddings", [*((name, True) for name in MESHES), ("fsdp=2 tensor=2", False)])
def test_loss_and_every_gradient_equal_those_of_one_device(name, tie_embeddings):
    statistics, gradients = scored(name, tie_embeddings=tie_embeddings)
    want_statistics, want_gradients = scored(None, tie_embeddings=tie_embeddings)
    for key, want in want_statistics.items():
        assert_close(statistics[key].total, want.total, key)
        assert statistics[key].mass == want.mass
    assert gradients.keys() == want_gradients.keys()
    for path, want in want_gradients.items():
        assert_close(gradients[path], want, path)


@pytest.mark.parametrize("name", MESHES)
def test_rows_and_every_large_leaf_are_split_on_each_axis_under_test(name):
    run = trainer(name)
    sizes = dict(run.mesh.shape)
    axes = [axis for axis in ("fsdp", "tensor") if sizes[axis] > 1]
    state = run.place()
    for tree in (state.params, state.opt_state):
        for path, leaf in named_leaves(tree).items():
            if leaf.size >= 1024:
                used = {axis for entry in leaf.sharding.spec for axis in np.atleast_1d(entry) if axis}
                assert set(axes) <= used, f"{path} {leaf.shape} is split over {used}, not {axes}"
                assert leaf.addressable_shards[0].data.size * np.prod([sizes[a] for a in axes]) == leaf.size
    tokens = run.place_batch(tiny_batch())["inputs"]
    assert tokens.addressable_shards[0].data.shape[0] == 8 // (sizes["data"] * sizes["fsdp"])


def test_the_batch_has_unequal_masks_and_a_row_without_any():
    scored_tokens = LanguageModel(tiny_decoder()).prepare(tiny_batch())["weights"].sum(axis=1)
    assert scored_tokens[-1] == 0
    assert len(set(scored_tokens.tolist())) > 4


@functools.cache
def trained(name: str | None) -> tuple[list[float], dict]:
    """Give the losses of four batches, two windows, and the weights after them."""
    run = trainer(name, accumulation=2)
    loop = run.loop(run.place())
    losses = [result.read()["loss"].value() for result in loop.run(tiny_batch(seed=seed) for seed in range(4))]
    return losses, named_leaves(jax.device_get(loop.state.variables))


@pytest.mark.parametrize("name", MESHES)
def test_training_equals_training_on_one_device(name):
    losses, variables = trained(name)
    want_losses, want_variables = trained(None)
    np.testing.assert_allclose(losses, want_losses, rtol=RTOL)
    for path, want in want_variables.items():
        np.testing.assert_allclose(variables[path], want, rtol=0, atol=5e-5 * np.max(np.abs(want)), err_msg=path)


@pytest.mark.parametrize("name", MESHES)
def test_evaluation_equals_evaluation_on_one_device(name):
    def held_out(name):
        run = trainer(name)
        pooled = run.evaluate(run.place().variables, [tiny_batch(seed=7), tiny_batch(seed=8)])
        return run.objective.report(pooled)

    got, want = held_out(name), held_out(None)
    assert set(want) == {"loss", "token_accuracy", "perplexity"}
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", MESHES)
def test_gradients_and_moments_stay_where_their_parameters_are(name):
    run = trainer(name, accumulation=2)
    loop = run.loop(run.place())
    list(loop.run([tiny_batch()]))  # the window is open: its sums are part of the state
    want = named_leaves(jax.tree.map(lambda leaf: leaf.sharding, loop.state.params))
    state = loop.state
    assert {p: leaf.sharding for p, leaf in named_leaves(state.accumulator.gradients).items()} == want
    moments = {path: leaf.sharding for path, leaf in named_leaves(state.opt_state).items() if "/mu/" in path}
    assert {path.split("/mu/")[1]: sharding for path, sharding in moments.items()} == want

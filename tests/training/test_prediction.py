"""Training with layers that predict further tokens: recomputation changes nothing, any window is its batches in one.

On meshes it is training on one device: `tests/training/test_mesh_law.py`.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dew.nn.backbones.banks import logical_names
from dew.nn.backbones.prediction import prediction_parts
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.prediction import PredictionSpec
from dew.nn.router import RouterSpec, RouterTraining
from dew.objectives.language import LanguageModel
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.optimizer import make_optimizer
from dew.training.step import batch_gradients
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.parallel.sequences import packed_batch
from tests.tiny import tiny_decoder, tiny_layer

ROUTER = RouterSpec(top_k=2, score="sigmoid", normalise=True, balance_bias=True)
EXPERTS = ExpertsSpec(num_experts=8, features=32, router=ROUTER, shared=MlpSpec(features=32))
MIXED = dataclasses.replace(tiny_layer(num_kv_heads=4), mlp=EXPERTS)
TRAINING = RouterTraining(balance_loss=0.5, z_loss=0.1, bias_rate=0.01)
DROPOUT = {"dropout_rate": 0.1, "embedding_dropout_rate": 0.1, "attention_dropout_rate": 0.1}


@functools.cache
def trainer(mesh=None, accumulation=1, **fields):
    spec = PredictionSpec(layer=MIXED, depth=2)
    layers = (tiny_layer(num_kv_heads=4),) * 2
    module = tiny_decoder(layers=layers, prediction=spec, router_training=TRAINING, **fields)
    where = mesh or build_mesh(MeshSpec(), jax.devices()[:1])
    optimizer = make_optimizer("sgd", 10.0)
    return Trainer(LanguageModel(module, mtp_weight=0.5), optimizer, mesh=where, accumulation=accumulation)


def weights(run):
    """Give weights whose routers are decided, so that rounding does not change a choice."""
    enlarge = lambda path, leaf: leaf * 30 if path[-2].key == "router" else leaf  # noqa: E731
    return jax.tree_util.tree_map_with_path(enlarge, run.place().variables)


def scored(**fields):
    run = trainer(**DROPOUT, **fields)
    differentiate = jax.jit(batch_gradients(run.objective, run.shardings().params))
    with run.context():
        output, gradients = differentiate(weights(run), run.place_batch(packed_batch()), jax.random.key(0))
    return jax.device_get({"loss": output.loss, **output.metrics}), named_leaves(jax.device_get(gradients))


def test_recomputation_changes_nothing():
    got, want = scored(remat="full"), scored()
    assert got[0].keys() == want[0].keys() >= {"loss", "cross_entropy", "prediction_loss", "router_balance"}
    for name, ratio in want[0].items():
        np.testing.assert_allclose(got[0][name].total, ratio.total, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(got[0][name].mass, ratio.mass, rtol=1e-6, err_msg=name)
    assert got[1].keys() == want[1].keys()
    for path, expected in want[1].items():
        scale = np.abs(expected).max()
        assert scale > 0, f"{path} is zero: the test could not fail"
        np.testing.assert_allclose(got[1][path], expected, rtol=0, atol=1e-5 * scale, err_msg=path)


def test_names_of_weights_need_no_mesh_that_splits_one_token():
    part = prediction_parts(trainer().objective.module)["prediction_0"]
    want = logical_names(part)
    logical_names.cache_clear()
    with trainer(MeshSpec(sequence=4, tensor=2)).context():
        assert logical_names(part) == want


def after(run, batches):
    loop = run.loop(run.place(weights(run)))
    losses = [result.read()["loss"] for result in loop.run(batches)]
    return losses, jax.device_get(loop.state)


def test_a_window_equals_its_batches_in_one():
    batch = packed_batch()
    pieces = [{name: value[row : row + 2] for name, value in batch.items()} for row in range(0, 8, 2)]
    whole, want = after(trainer(), [batch])
    parts, got = after(trainer(accumulation=4), pieces)
    assert len({part.mass for part in parts}) > 2, "masks are equal: a mean of means would pass"
    assert sum(part.total for part in parts) == pytest.approx(whole[0].total, rel=1e-6)
    start = named_leaves(jax.device_get(weights(trainer()))["params"])
    for path, weight in named_leaves(want.params).items():
        moved = weight - start[path]
        assert np.abs(moved).max() > 0, path
        atol = 1e-5 * np.abs(moved).max() + np.spacing(np.abs(weight).max())
        np.testing.assert_allclose(named_leaves(got.params)[path] - start[path], moved, rtol=0, atol=atol, err_msg=path)


def test_biases_of_the_routers_move_by_their_rate():
    _, state = after(trainer(), [packed_batch()])
    for index in range(2):
        bias = state.params[f"prediction_{index}"]["block"]["mlp"]["router"]["balance_bias"]
        np.testing.assert_allclose(np.unique(np.abs(bias)), [0.01], rtol=1e-6)

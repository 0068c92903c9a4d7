"""Experts under the facade: any mesh scores and trains as one device, ragged batches too, under a Keras loss too."""

import dataclasses
import functools

import jax
import keras
import numpy as np
import pytest

import dew_keras
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec, RouterTraining
from dew.objectives.language import LanguageModel
from dew.objectives.routing import ROUTING_METRICS
from dew.training.placing import plain
from dew.tree import map_named, named_leaves
from dew_keras.module_config import module_config, module_from_config
from tests.dew_keras.nets import one_device
from tests.pretrained.checkpoints import FIXTURES
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

RATE = 0.01
EXPERTS = ExpertsSpec(
    num_experts=4,
    features=32,
    router=RouterSpec(top_k=2, score="sigmoid", normalise=True, balance_bias=True),
    shared=MlpSpec(features=32),
)
MODULE = tiny_decoder(
    layers=(tiny_layer(), dataclasses.replace(tiny_layer(), mlp=EXPERTS)),
    router_training=RouterTraining(balance_loss=0.5, z_loss=0.1, bias_rate=RATE),
)
MESH = {"expert": 2, "fsdp": 2, "tensor": 2}
LAYOUT = dew_keras.Layout(min_shard=1, tolerance=1.0)
TOKENS = tiny_batch(rows=7, length=12)
KERAS_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@functools.cache
def weights():
    """Draw weights whose routers are decided, so that rounding does not change a choice."""
    drawn = plain(LanguageModel(MODULE).init(jax.random.key(1)))
    enlarge = lambda path, leaf: leaf * 30 if "/router/" in path else leaf  # noqa: E731
    return jax.device_get(map_named(enlarge, drawn))


class OwnStep(dew_keras.Model):
    """A model with a step of its own, which does what Keras' own does."""

    def train_step(self, state, data):
        return super().train_step(state, data)


def model_on(mesh=MESH, loss="auto", kind=dew_keras.Model, rate=0.05, **options):
    model = kind(MODULE, variables=weights())
    model.compile(keras.optimizers.SGD(rate), loss, mesh=mesh or one_device(), layout=LAYOUT, **options)
    return model


def test_fit_logs_what_the_routers_say_and_gives_the_losses_of_one_device():
    tokens = np.random.default_rng(0).integers(0, 64, (8, 13)).astype(np.int32)

    def history(mesh):
        model = dew_keras.Model.from_preset(str(FIXTURES / "mixtral"))
        model.compile(
            optimizer=keras.optimizers.AdamW(2e-5), mesh=mesh, layout=dew_keras.Layout(min_shard=1, tolerance=1.0)
        )
        return model.fit(tokens, batch_size=8, epochs=2, verbose=0).history

    got, want = history({"expert": 4, "fsdp": 2}), history(one_device())
    assert set(ROUTING_METRICS) < set(got)
    assert 1 <= got["expert_load_max"][0] <= 2
    for name, values in want.items():
        assert got[name] == pytest.approx(values, rel=1e-4), name


def test_rows_that_fill_a_batch_up_count_nowhere():
    want = model_on(None).evaluate(TOKENS, batch_size=7, return_dict=True, verbose=0)
    assert want["perplexity"] < np.exp(want["loss"]) / 1.5, "the routers add to the loss"
    for mesh, size in ((None, 4), (MESH, 3)):
        got = model_on(mesh).evaluate(TOKENS, batch_size=size, return_dict=True, verbose=0)
        assert got == pytest.approx(want, rel=1e-5), (mesh, size)


def test_training_on_a_ragged_batch_is_training_on_its_rows():
    def trained(mesh):
        model = model_on(mesh)
        model.fit(TOKENS, batch_size=7, epochs=2, shuffle=False, verbose=0)
        return named_leaves(jax.device_get(model.variables))

    got, want = trained(MESH), trained(None)
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, rtol=0, atol=2e-5 * np.abs(value).max(), err_msg=path)


def test_bfloat16_with_float32_masters_trains_as_on_one_device():
    # At ten times this rate the first step is longer than the weights and overshoots: what bfloat16 leaves of the
    # gradients, 1 to 2 %, becomes 3 % of router_z. Before the step that differs by 7e-5, in float32 by nothing.
    def history(mesh):
        model = model_on(mesh, dtype="mixed_bfloat16", rate=0.005)
        found = model.fit(TOKENS, batch_size=7, epochs=2, shuffle=False, verbose=0).history
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.variables)} == {"float32"}
        return found

    got, want = history({"expert": 2, "fsdp": 4}), history(None)
    assert want["loss"][1] < want["loss"][0]
    assert got["loss"] == pytest.approx(want["loss"], rel=5e-3)
    for name, values in want.items():
        assert got[name] == pytest.approx(values, rel=2e-2, abs=1e-6), name


@functools.cache
def trained_on_rows(loss, kind=dew_keras.Model):
    """Give the loss of seven rows in batches of four, and the weights after training on all, every token scored."""
    tokens = TOKENS["tokens"]
    data = (tokens,) if loss == "auto" else (tokens[:, :-1], tokens[:, 1:])
    model = model_on(MESH, loss, kind)
    before = model.evaluate(*data, batch_size=4, verbose=0, return_dict=True)["loss"]
    model.fit(*data, batch_size=7, epochs=2, shuffle=False, verbose=0)
    return before, named_leaves(jax.device_get(model.variables))


@pytest.mark.parametrize("kind", [dew_keras.Model, OwnStep], ids=["compiled", "own step"])
def test_a_keras_loss_is_trained_with_what_the_routers_add(kind):
    loss, params = trained_on_rows(KERAS_LOSS, kind)
    want_loss, want = trained_on_rows("auto")
    assert loss == pytest.approx(want_loss, rel=1e-5)
    start, moved = named_leaves(weights()), 0
    for path, value in want.items():
        np.testing.assert_allclose(params[path], value, rtol=0, atol=5e-5 * np.abs(value).max(), err_msg=path)
        if path.endswith("balance_bias"):
            steps = np.abs(params[path] - start[path]) / RATE
            np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
            moved += np.count_nonzero(steps)
    assert moved > 2


def test_a_file_of_the_whole_model_keeps_what_trains_the_routers_and_the_summary_says_where_experts_are():
    assert module_from_config(module_config(MODULE), None, safe_mode=True) == MODULE
    said = []
    model_on(MESH, sequence_length=12).summary(print_fn=said.append)
    assert (
        "experts of 1 layer: 4, 2 a token; 2 on each of expert=2; their hidden width over tensor=2; 12 tokens"
        in said[0]
    )

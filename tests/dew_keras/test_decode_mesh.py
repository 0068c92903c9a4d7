"""`generate` on a mesh of its own between two fits: the training goes on as if it had not happened.

`tools/decode_law.py` shows it on every factorisation of 8 devices.
"""

import gc
import os
import signal
import weakref

import jax
import keras
import numpy as np
import pytest

import dew_keras
import dew_keras.generation
from dew.placement import LayoutRefused
from dew.placement.memory import live_bytes_per_device
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder
from tools import decode_law
from tools.decode_law import ANSWER, PROMPTS, differing, held
from tools.mesh_cases import EXCHANGES, SCHEDULES, Factors, factorisations, refused

LAYOUT = dew_keras.Layout(min_shard=512, tolerance=0)
TENSOR = {"data": 4, "tensor": 2}


def model_on(mesh):
    model = dew_keras.Model(tiny_decoder(num_layers=2))
    model.compile(keras.optimizers.Adam(0.05), mesh=mesh, layout=LAYOUT)
    return model


def fitted(model, seed):
    model.fit(tiny_batch(seed=seed), batch_size=8, verbose=0)
    return jax.device_get(model.variables)


@pytest.fixture(scope="module")
def model():
    """A model that was trained once; what it then holds may not change but by training."""
    model = model_on({"fsdp": 8})
    fitted(model, 0)
    return model


def assert_held(model, want):
    """An interrupted or finished generate leaves values and places."""
    assert differing(held(model), want) == []


def test_fit_generate_fit_is_fit_fit(model):
    before = held(model)
    gc.collect()
    live = sum(live_bytes_per_device().values())
    plain = model.generate(PROMPTS, **ANSWER)
    moved = model.generate(PROMPTS, mesh=TENSOR, **ANSWER)
    drawn = [model.generate(PROMPTS, mesh=mesh, sampler="random", seed=3, **ANSWER) for mesh in (None, TENSOR)]
    assert moved == plain
    assert drawn[0] == drawn[1] != plain
    assert_held(model, before)
    gc.collect()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.variables))
    assert sum(live_bytes_per_device().values()) - live < weights / 8, "the weights must not be left twice"
    got = fitted(model, 1)

    other = model_on({"fsdp": 8})
    fitted(other, 0)
    jax.tree.map(np.testing.assert_array_equal, got, fitted(other, 1))


CASES = {case.factors: case for case in decode_law.decode_cases()}


@pytest.mark.parametrize(
    "factors",
    [
        Factors(sequence=8),
        Factors(tensor=8),
        Factors(fsdp=2, sequence=2, stage=2),
        Factors(expert=2, fsdp=2, sequence=2),
        Factors(expert=2, stage=4),
    ],
    ids=str,
)
def test_on_a_mesh_of_any_kind_a_fit_goes_on_after_generate_as_if_it_had_not_happened(factors):
    case = CASES[factors]
    assert decode_law.judge(case).defects == []
    answers = decode_law.one_device(case.features, case.layers)
    assert answers["greedy"] != answers["drawn"]


def test_the_law_of_generation_between_fits_is_about_every_mesh_in_every_schedule_and_exchange():
    assert sorted(CASES) == sorted(factorisations())
    assert {case.way.schedule for case in CASES.values()} == {None, *SCHEDULES}
    assert {case.way.exchange for case in CASES.values()} == {None, *EXCHANGES}
    assert [case for case in CASES.values() if refused(case)] == []
    assert {case.features.sparse for case in CASES.values() if case.factors.expert > 1} == {True}


def test_what_generation_would_leave_behind_breaks_the_law(capsys, monkeypatch):
    case = CASES[Factors(fsdp=8)]
    want = decode_law.one_device(case.features, case.layers)
    monkeypatch.setattr(decode_law, "one_device", lambda *given: want | {"drawn": want["greedy"]})

    def nudged(model):
        model._engine.lend_variables(jax.tree.map(lambda leaf: leaf * (1 + 2**-22), model.variables))
        return want

    monkeypatch.setattr(decode_law, "answers", nudged)
    assert decode_law.main(["--mesh", "fsdp=8"]) == 1
    said = capsys.readouterr().out
    assert "FAILS   fsdp=8" in said
    assert "drawn tokens" in said
    assert "greedy tokens" not in said
    assert "not as before generate: " in said
    assert "not as after fit and fit: " in said
    assert "1 cases: 0 hold, 0 are refused as listed, 1 fail" in said


def test_while_it_generates_the_weights_are_there_and_nowhere_else(model, monkeypatch):
    seen = {}

    def look(task, *args, **kwargs):
        gc.collect()
        seen["left behind"] = [path for path, old in stored.items() if old() is not None]
        seen["axes"] = dict(task.mesh.shape)
        seen["specs"] = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(task.variables) if leaf.ndim > 2}

    monkeypatch.setattr(dew_keras.generation.TextGeneration, "__call__", look)
    stored = {path: weakref.ref(leaf) for path, leaf in named_leaves(model.variables).items()}
    model.generate(PROMPTS, mesh=TENSOR)
    assert seen["axes"]["tensor"] == 2
    assert all("tensor" in spec for spec in seen["specs"])
    assert seen["left behind"] == []


class Stopped(Exception):  # noqa: N818 - no error
    """What the test stops generation with."""


@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
def test_an_error_inside_leaves_the_model_as_it_was(model, monkeypatch, error):
    want, said = held(model), model.generate(PROMPTS, **ANSWER)

    def stop(task, *args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(dew_keras.generation.TextGeneration, "__call__", stop)
        with pytest.raises(error):
            model.generate(PROMPTS, mesh=TENSOR, **ANSWER)
    assert_held(model, want)
    assert model.generate(PROMPTS, **ANSWER) == said


@pytest.mark.parametrize("place", [2, 7, 13, 20])
def test_ctrl_c_at_any_leaf_of_the_move_leaves_the_model_as_it_was(model, monkeypatch, place):
    # The tree has 12 leaves: the first two places are on the way there, the last two on the way back.
    want, writes = held(model), []
    lend_variables = model._engine.lend_variables

    def interrupted(variables):
        writes.append(len(writes))
        if writes[-1] == place:
            os.kill(os.getpid(), signal.SIGINT)
        lend_variables(variables)

    monkeypatch.setattr(model._engine, "lend_variables", interrupted)
    monkeypatch.setattr(dew_keras.generation.TextGeneration, "__call__", lambda *args, **kwargs: None)
    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPTS, mesh=TENSOR)
    assert len(writes) > place
    assert_held(model, want)


@pytest.mark.parametrize(
    "mesh, named", [({"fsdp": 8}, TENSOR), ({"stage": 2, "fsdp": 2}, None)], ids=["named", "stage"]
)
def test_a_running_fit_gets_its_weights_back_before_the_next_step(mesh, named):
    said, model, other = [], model_on(mesh), model_on(mesh)

    class Samples(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            said.append(self.model.generate(PROMPTS, mesh=named, **ANSWER))

    batches = [tiny_batch(seed=seed) for seed in range(3)]
    model.fit(iter(batches), steps_per_epoch=3, verbose=0, callbacks=[Samples()])
    other.fit(iter(batches), steps_per_epoch=3, verbose=0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(model.variables), jax.device_get(other.variables))
    assert len(said) == 3
    assert said[2] == other.generate(PROMPTS, **ANSWER) == model.generate(PROMPTS, **ANSWER)
    assert said[0] != said[2]


@pytest.mark.parametrize(
    "mesh, error, message",
    [
        ({"tensor": 8}, LayoutRefused, "4 query heads do not divide tensor=8"),
        ({"sequence": 8}, LayoutRefused, "Decoding on sequence=8"),
        ({"tensor": 5}, ValueError, "does not divide the 8 given devices"),
        ("auto", TypeError, "mesh must be a MeshSpec, a mapping such as"),
    ],
)
def test_a_mesh_that_does_not_fit_moves_nothing(model, mesh, error, message):
    want = named_leaves(model.variables)
    with pytest.raises(error, match=message):
        model.generate(PROMPTS, mesh=mesh)
    assert all(leaf is want[path] for path, leaf in named_leaves(model.variables).items())

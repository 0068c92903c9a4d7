"""Interrupted and resumed equals uninterrupted: mid-epoch, mid-window, on another mesh, in other banks."""

import functools
import shutil

import jax
import numpy as np
import pytest

from dew.checkpoint.save import Checkpoints
from dew.data.dataset import Dataset
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec
from dew.training.optimizer import make_optimizer
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder

STEPS, STOP = 7, 5  # 20 records in batches of 8: step 5 is inside the second epoch
SPLIT = MeshSpec(fsdp=2, tensor=2)
DROPOUT = {"dropout_rate": 0.1, "embedding_dropout_rate": 0.1, "attention_dropout_rate": 0.1}


def dataset():
    return Dataset.from_records(tiny_batch(rows=20), batch=8, seed=3, validation=tiny_batch(rows=8, seed=9))


def trainer(mesh=SPLIT, accumulation=1, directory=None, **fields):
    return Trainer(
        LanguageModel(tiny_decoder(num_layers=2, **DROPOUT, **fields)),
        make_optimizer("adamw", 1e-2, eps=1e-3),
        mesh=mesh,
        layout=Layout(min_shard=1, tolerance=0),
        accumulation=accumulation,
        checkpoints=Checkpoints(directory) if directory else None,
    )


def by_layer(run, state):
    return named_leaves(run.stacks.unstack(jax.device_get(state.variables)))


@functools.cache
def uninterrupted(accumulation):
    run = trainer(accumulation=accumulation)
    return by_layer(run, run.fit(dataset(), steps=STEPS, write=None))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Give the directory of a run that stopped early, to be copied: what resumes saves into its own."""

    @functools.cache
    def directory(accumulation):
        place = tmp_path_factory.mktemp("interrupted")
        trainer(accumulation=accumulation, directory=place).fit(dataset(), steps=STOP, write=None)
        return place

    return directory


@pytest.mark.parametrize(
    "accumulation, mesh, fields",
    [
        (1, SPLIT, {}),
        (3, SPLIT, {}),  # 5 = 3 + 2: two batches of the second window are in
        (3, MeshSpec(fsdp=4), {}),
        (3, MeshSpec(), {"scan_layers": False}),
    ],
    ids=["same mesh", "open window", "another mesh", "another mesh, other banks"],
)
def test_resumed_equals_uninterrupted(tmp_path, interrupted, accumulation, mesh, fields):
    shutil.copytree(interrupted(accumulation), tmp_path, dirs_exist_ok=True)
    again = trainer(mesh, accumulation, tmp_path, **fields)
    state = again.fit(dataset(), steps=STEPS, write=None)
    assert (int(state.step), int(state.microstep)) == (STEPS, STEPS % accumulation)
    got, want = by_layer(again, state), uninterrupted(accumulation)
    assert got.keys() == want.keys()
    exact = mesh == SPLIT
    for path, leaf in want.items():
        # On the same mesh the programs are the same; another mesh sums in another order.
        atol = 0 if exact else 1e-4 * np.abs(leaf).max()
        np.testing.assert_allclose(got[path], leaf, rtol=0, atol=atol, err_msg=path)


def test_a_run_at_its_target_does_nothing(tmp_path):
    trainer(directory=tmp_path).fit(dataset(), steps=2, write=None)
    opened = []
    data = Dataset(train=lambda partition: opened.append(partition), records=20, batch=8)
    state = trainer(directory=tmp_path).fit(data, steps=2, write=None)
    assert int(state.step) == 2
    assert opened == []


def test_checkpoints_follow_the_interval_and_the_last_step(tmp_path):
    run = trainer(directory=tmp_path)
    run.fit(dataset(), steps=5, checkpoint_every=2, write=None)
    assert run.checkpoints.steps() == (4, 5)
    assert run.checkpoints.manifest(4).position["batches"] == 4


def test_another_window_length_is_refused_while_a_window_is_open(tmp_path):
    trainer(accumulation=3, directory=tmp_path).fit(dataset(), steps=4, write=None)
    with pytest.raises(ValueError, match="saved after 1 of the 3 batches of an update; accumulation=2"):
        trainer(accumulation=2, directory=tmp_path).place()


def test_another_window_length_is_fine_between_windows(tmp_path):
    trainer(accumulation=2, directory=tmp_path).fit(dataset(), steps=4, write=None)
    assert int(trainer(accumulation=3, directory=tmp_path).fit(dataset(), steps=7, write=None).updates) == 3


def test_another_optimizer_is_refused_and_the_checkpoint_stays(tmp_path):
    trainer(directory=tmp_path).fit(dataset(), steps=2, write=None)
    other = trainer(directory=tmp_path)
    other.optimizer = make_optimizer("sgd", 1.0, momentum=0.9)
    with pytest.raises(ValueError, match="saved by another model or optimizer"):
        other.place()
    assert other.checkpoints.steps() == (2,)


def test_fit_reports_training_and_validation():
    lines = []
    trainer().fit(dataset(), steps=4, log_every=2, eval_every=4, write=lines.append)
    assert sorted(line.split(":")[0] for line in lines) == ["step 2/4", "step 4/4", "step 4/4 validation"]
    assert all("perplexity" in line for line in lines)


def test_data_that_ends_early_stops_the_run_with_a_warning():
    data = Dataset(train=lambda _: iter([tiny_batch()] * 2), records=16, batch=8)
    with pytest.warns(UserWarning, match="ended after 2 of 5 steps"):
        state = trainer().fit(data, steps=5, write=None)
    assert int(state.step) == 2


@pytest.mark.parametrize(
    "data, options, message",
    [
        (Dataset(train=lambda _: iter(()), records=0, batch=8), {}, "The data set is empty: records=0"),
        (Dataset(train=lambda _: iter(()), batch=8), {}, "The data set is empty: it gave no batch"),
        (dataset(), {"steps": 0}, "steps must be at least 1"),
        (dataset(), {"checkpoint_every": 2}, "checkpoint_every=2 needs a place to save"),
        (dataset(), {"eval_every": 0}, "eval_every must be at least 1"),
        (Dataset(train=lambda _: iter(()), records=8, batch=8), {"eval_every": 1}, "needs validation data"),
    ],
)
def test_a_run_that_cannot_be_meant_is_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        trainer().fit(data, **({"steps": 3, "write": None} | options))


def test_a_stream_without_a_position_cannot_be_checkpointed(tmp_path):
    data = Dataset(train=lambda _: iter([tiny_batch()] * 4), records=32, batch=8)
    with pytest.raises(ValueError, match="get_state and set_state; list_iterator has none"):
        trainer(directory=tmp_path).fit(data, steps=2, checkpoint_every=1, write=None)

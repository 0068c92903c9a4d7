"""A model that is compiled for another mesh moves there one array at a time, weights and moments."""

import gc

import jax
import keras
import numpy as np
import pytest

import dew_keras
from dew.placement.memory import live_bytes_per_device
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder

LAYOUT = dew_keras.Layout(min_shard=512, tolerance=0)


def live():
    gc.collect()
    return sum(live_bytes_per_device().values())


@pytest.fixture
def peak(monkeypatch):
    """Record the most bytes that live behind any copy between devices."""
    found, put = [0], jax.device_put

    def watched(*args, **kwargs):
        result = put(*args, **kwargs)
        found[0] = max(found[0], live())
        return result

    monkeypatch.setattr(jax, "device_put", watched)
    return found


@pytest.mark.usefixtures("quick_collections")
def test_one_array_is_there_twice_at_most(peak):
    model, optimizer = dew_keras.Model(tiny_decoder(num_layers=2)), keras.optimizers.Adam(0.05)
    model.compile(optimizer, mesh={"fsdp": 8}, layout=LAYOUT)
    model.fit(tiny_batch(), batch_size=8, verbose=0)
    want = named_leaves(jax.device_get(model._engine.state))
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(model.variables)]
    assert sum(sizes) > 4 * max(sizes)

    model.compile(optimizer, mesh={"fsdp": 8}, layout=LAYOUT)  # lets go of what the fit made
    before, peak[0] = live(), 0
    model.compile(optimizer, mesh={"fsdp": 4, "tensor": 2}, layout=LAYOUT)
    assert before < peak[0] <= before + 1.5 * max(sizes)

    trainer = model.trainer
    before, peak[0] = live(), 0
    model._engine._conform_state(trainer)
    assert before < peak[0] <= before + 1.5 * max(sizes)
    assert live() <= before + max(sizes) / 2
    for path, sharding in named_leaves(trainer.shardings().opt_state).items():
        assert named_leaves(model._engine.state.opt_state)[path].sharding == sharding, path
    got = named_leaves(jax.device_get(model._engine.state))
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)

"""Heads too few to trade, and windows in turn: with positions split, loss and every gradient are those of one device.

Every factorisation of 8 devices is in `tests/training/test_mesh_law.py`.
"""

import functools

import jax
import numpy as np
import pytest

from dew.nn.block import LayerSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.norm import NormSpec
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.training.optimizer import make_optimizer
from dew.training.step import batch_gradients
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.parallel.sequences import LENGTH, UNSCORED, packed_batch
from tests.tiny import tiny_decoder, tiny_layer

STRICT = Layout(rules=(*DEFAULT_RULES, ("norm", "tensor")), min_shard=1, tolerance=0)
MESHES = {
    "sequence=8": MeshSpec(sequence=8),  # 4 heads: keys and values are gathered
    "fsdp=2 tensor=2 sequence=2": MeshSpec(fsdp=2, tensor=2, sequence=2),
    "tensor=2 sequence=4": MeshSpec(tensor=2, sequence=4),  # 2 heads on a device: gathered
    "fsdp=2 sequence=4": MeshSpec(fsdp=2, sequence=4),
}
FIELDS = {
    # Gathered weights and recomputed blocks around an exchange with a backward pass of its own.
    "fsdp=2 sequence=4": {"sequence_impl": "ring", "remat": "full"},
}
RTOL = 1e-5


@functools.cache
def trainer(name: str | None) -> Trainer:
    layers = (tiny_layer(sinks=True), tiny_layer(window=9), tiny_layer(chunk=11))
    module = tiny_decoder(layers=layers, norm=NormSpec(eps=1e-5), **FIELDS.get(name, {}))
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if name is None else build_mesh(MESHES[name])
    return Trainer(
        LanguageModel(module),
        # A large eps: Adam divides by the gradient's own size, which would magnify rounding where that is near 0.
        make_optimizer("adamw", 1e-2, clip_norm=1.0, eps=1e-2),
        mesh=mesh,
        layout=STRICT if name is None or "fsdp" in name or "tensor" in name else None,
    )


@functools.cache
def drawn() -> dict:
    """Draw the weights, which are the same on every mesh."""
    return jax.device_get(trainer(None).place().variables)


@functools.cache
def scored(name: str | None) -> tuple[dict, dict]:
    run = trainer(name)
    state = run.place(drawn())
    differentiate = jax.jit(batch_gradients(run.objective, run.shardings().params))
    with run.context():
        output, gradients = differentiate(state.variables, run.place_batch(packed_batch()), jax.random.key(0))
    return jax.device_get({"loss": output.loss, **output.metrics}), named_leaves(jax.device_get(gradients))


def assert_close(got, want, what):
    scale = np.max(np.abs(want))
    assert scale > 0, f"{what} is zero: the test could not fail"
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * scale, err_msg=what)


@pytest.mark.parametrize("name", MESHES)
def test_loss_and_every_gradient_equal_those_of_one_device(name):
    (statistics, gradients), (want_statistics, want_gradients) = scored(name), scored(None)
    for key, want in want_statistics.items():
        assert_close(statistics[key].total, want.total, key)
        assert statistics[key].mass == want.mass
    assert gradients.keys() == want_gradients.keys()
    for path, want in want_gradients.items():
        assert_close(gradients[path], want, path)


@pytest.mark.parametrize("name", MESHES)
def test_positions_are_split_and_targets_were_shifted_before(name):
    run = trainer(name)
    shards = run.mesh.shape["sequence"]
    host, placed = run.objective.prepare(packed_batch()), run.place_batch(packed_batch())
    assert set(placed) == {"inputs", "targets", "weights", "segment_ids", "positions"}
    for field, array in placed.items():
        assert {shard.data.shape[1] for shard in array.addressable_shards} == {LENGTH // shards}
        np.testing.assert_array_equal(array, host[field])
    last = next(s for s in placed["targets"].addressable_shards if s.index[1].stop == LENGTH // shards)
    np.testing.assert_array_equal(last.data[:, -1], packed_batch()["tokens"][last.index[0], LENGTH // shards])


def test_the_batch_is_awkward():
    weights = LanguageModel(tiny_decoder()).prepare(packed_batch())["weights"]
    assert weights[:, UNSCORED].sum() == 0 == weights[-1].sum()
    assert len(set(weights.sum(axis=1).tolist())) > 5


def test_lengths_that_do_not_divide_are_refused():
    run = trainer("sequence=8")
    rows = {"tokens": np.ones((8, 45), np.int32)}
    state = run.place(drawn())
    with pytest.raises(LayoutRefused, match=r"44 positions do not divide into 8 equal parts.*Use rows of 32 or 48 "):
        list(run.loop(state).run([rows]))


def test_lengths_are_refused_before_tracing_with_those_that_every_layer_takes():
    scan = Mamba2Spec(num_heads=4, head_dim=8, num_groups=1, state_size=6)
    layers = (tiny_layer(), LayerSpec(mixer=scan, mlp=None, norm=NormSpec(eps=1e-5)))
    run = Trainer(LanguageModel(tiny_decoder(layers=layers)), "sgd", mesh=MeshSpec(sequence=8))
    rows = {"tokens": np.ones((8, 25), np.int32)}
    for refusing in (run.lower, run.place_batch):
        # The attention alone would take 16 too, where slices are shorter than the convolution's reach.
        with pytest.raises(LayoutRefused, match=r"24 positions do not divide into 16 .* Use rows of 32 positions\.$"):
            refusing(rows)
    run.place_batch({"tokens": np.ones((8, 33), np.int32)})

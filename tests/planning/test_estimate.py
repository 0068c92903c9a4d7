"""The estimate is what devices hold once the model is placed, and it needs no devices."""

import re

import jax
import jax.numpy as jnp
import pytest

from dew.inference.prefill import cache_shardings
from dew.objectives.language import LanguageModel
from dew.placement import Layout, MeshSpec, build_mesh, bytes_per_device
from dew.planning import estimate_bytes, plan_text, planned_mesh
from dew.training.trainer import Trainer
from tests.tiny import tiny_decoder, tiny_layer

FULL = Layout(min_shard=1, tolerance=0)


def held(tree):
    """Bytes of a tree's shards on the fullest device."""
    totals = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            totals[shard.device] = totals.get(shard.device, 0) + shard.data.nbytes
    return max(totals.values())


@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(fsdp=8), MeshSpec(fsdp=4, tensor=2)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_estimate_is_what_training_holds(spec, optimizer):
    module = tiny_decoder()
    estimate = estimate_bytes(module, planned_mesh(spec, 8), FULL, optimizer=optimizer, accumulation=2)
    state = Trainer(LanguageModel(module), optimizer, mesh=spec, layout=FULL, accumulation=2).place()
    assert estimate.masters == held(state.params)
    assert estimate.optimizer_state == held(state.opt_state)
    assert estimate.gradients == held(state.params) + held(state.accumulator)
    assert estimate.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_estimate_counts_the_whole_tables_of_1f1b(is_tied):
    module = tiny_decoder(schedule="1f1b", tie_embeddings=is_tied)
    mesh = planned_mesh({"stage": 2, "fsdp": 4})
    estimate = estimate_bytes(module, mesh, FULL)
    assert estimate.tables == (1 if is_tied else 2) * 64 * 32 * (4 + 4)
    assert estimate.train == estimate.masters + estimate.gradients + estimate.optimizer_state + estimate.tables
    assert re.search(r"whole token tables \(1f1b\) +[\d.]+ kB", plan_text(estimate))
    for other, where in ((module.clone(schedule="gpipe"), mesh), (module, planned_mesh({"fsdp": 8}))):
        assert estimate_bytes(other, where, FULL).tables == 0


def test_the_estimate_is_what_generating_holds():
    module = tiny_decoder(param_dtype="bfloat16", dtype="bfloat16")
    mesh = build_mesh(MeshSpec(fsdp=4, tensor=2))
    estimate = estimate_bytes(module, mesh, FULL, rows=8, slots=32)
    placed = cache_shardings(module, mesh, FULL.rules, 8, 32)
    cache = jax.jit(lambda: module.init_cache(8, 32), out_shardings=placed)()
    assert estimate.cache == held(cache)
    assert estimate.weights * 2 == estimate.masters
    assert estimate.generate == estimate.weights + estimate.cache
    assert estimate.train == estimate.masters + estimate.gradients + estimate.optimizer_state


def test_a_mesh_larger_than_the_machine_is_planned():
    small, large = (estimate_bytes(tiny_decoder(), planned_mesh({"fsdp": fsdp}), FULL, rows=64) for fsdp in (1, 32))
    # A width of 32 splits over 32 devices wherever a leaf has it.
    assert large.mesh_shape["fsdp"] == 32
    assert large.masters < small.masters / 16
    assert small.mesh_shape["data"] == 1


def test_a_refused_layout_is_reported_with_its_reason():
    module = tiny_decoder(layers=(tiny_layer(num_heads=9, num_kv_heads=3),) * 2)
    estimate = estimate_bytes(module, planned_mesh({"tensor": 2}), FULL)
    assert "9 query heads do not divide tensor=2" in estimate.refusal
    text = plan_text(estimate)
    assert "9 query heads / 3 kv heads do not divide tensor=2: attention stays whole" in text
    assert "Refused: On mesh tensor=2" in text
    assert (
        "stage=4 does not divide the model's 2 layers"
        in estimate_bytes(module, planned_mesh({"stage": 4}), FULL).refusal
    )
    assert estimate_bytes(module, planned_mesh({"stage": 2}), FULL).refusal is None


def test_the_text_says_whether_it_fits():
    estimate = estimate_bytes(tiny_decoder(), planned_mesh({"fsdp": 4}), FULL)
    between = (estimate.generate + estimate.train) / 2
    text = plan_text(estimate, device_bytes=between, table=True)
    assert re.search(r"to generate +[\d.]+ kB  fits in", text)
    assert re.search(r"to train +[\d.]+ kB  does not fit in", text)
    assert "params/layers_0..3/mlp/gate_proj/kernel x4" in text
    assert "gate_proj/kernel" not in plan_text(estimate)


@pytest.mark.parametrize(
    "mesh, devices, match",
    [
        ({"fsdp": 3}, 8, "reserves 3 devices, which does not divide 8"),
        ({"data": 4, "fsdp": 4}, 8, "data=4, but 8 devices leave data=2"),
        ({"tensr": 2}, None, "Unknown mesh axis 'tensr'"),
        ({"data": 0}, None, "data=0"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, devices, match):
    with pytest.raises(ValueError, match=match):
        planned_mesh(mesh, devices)


def test_numbers_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="rows=0"):
        estimate_bytes(tiny_decoder(), planned_mesh({}), rows=0)
    with pytest.raises(ValueError, match="adamw"):
        estimate_bytes(tiny_decoder(), planned_mesh({}), optimizer="adamww")


def test_planning_makes_no_array():
    before = len(jax.live_arrays())
    estimate_bytes(tiny_decoder(features=64), planned_mesh({"fsdp": 8}), FULL)
    assert len(jax.live_arrays()) <= before
    assert bytes_per_device(jnp.zeros(3)) == 12

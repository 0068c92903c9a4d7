"""Layouts: declared trees become shardings, refusals name the way out, explanations give the reason by heads."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dew.placement import Bank, Layout, LayoutRefused, MeshSpec, StackView, build_mesh
from dew.tree import named_leaves


def box(shape, names):
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names=names)


def decoder(L=4, D=32, N=4, K=2, H=8, F=64, V=64):
    """The declarations of a small banked decoder."""
    return {
        "params": {
            "embed_tokens": {"embedding": box((V, D), ("vocab", "embed"))},
            f"layers_0_{L - 1}": {
                "input_layernorm": {"scale": box((L, D), ("layers", "norm"))},
                "self_attn": {
                    "q_proj": {"kernel": box((L, D, N, H), ("layers", "embed", "heads", "head_dim"))},
                    "k_proj": {"kernel": box((L, D, K, H), ("layers", "embed", "kv", "head_dim"))},
                    "o_proj": {"kernel": box((L, N, H, D), ("layers", "heads", "head_dim", "embed"))},
                },
                "mlp": {
                    "gate_proj": {"kernel": box((L, D, F), ("layers", "embed", "mlp"))},
                    "down_proj": {"kernel": box((L, F, D), ("layers", "mlp", "embed"))},
                },
            },
            "norm": {"scale": box((D,), ("norm",))},
        }
    }


def view(L=4):
    return StackView((Bank(f"layers_0_{L - 1}", tuple(f"layers_{index}" for index in range(L))),))


def specs(shardings):
    return {path: sharding.spec for path, sharding in named_leaves(shardings).items()}


FULL = Layout(min_shard=1, tolerance=0)


def test_shardings_have_the_unboxed_structure_and_follow_the_rules():
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2))
    got = FULL.shardings(mesh, decoder())
    assert jax.tree.structure(got) == jax.tree.structure(nn.meta.unbox(decoder()))
    assert specs(got)["params/layers_0_3/mlp/gate_proj/kernel"] == P(None, "fsdp", "tensor")
    assert specs(got)["params/layers_0_3/self_attn/o_proj/kernel"] == P(None, "tensor", None, "fsdp")
    assert specs(got)["params/embed_tokens/embedding"] == P("tensor", "fsdp")
    assert specs(got)["params/norm/scale"] == P("fsdp")


@pytest.mark.parametrize("spec, axes", [(MeshSpec(fsdp=8), {"fsdp"}), (MeshSpec(fsdp=2, tensor=2), {"fsdp", "tensor"})])
def test_every_leaf_of_a_thousand_elements_splits_on_every_axis(spec, axes):
    mesh = build_mesh(spec)
    tree = nn.meta.unbox(decoder())
    for (path, leaf), sharding in zip(
        named_leaves(tree).items(), jax.tree.leaves(FULL.shardings(mesh, decoder())), strict=True
    ):
        if np.prod(leaf.shape) >= 1024:
            used = {
                axis for entry in sharding.spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)
            }
            assert used == axes, path


def test_min_shard_counts_the_elements_of_one_layer():
    mesh = build_mesh(MeshSpec(fsdp=8))
    tree = decoder(L=4)
    banked = specs(Layout(min_shard=2048).shardings(mesh, tree))
    alone = specs(Layout(min_shard=2048).shardings(mesh, view().unstack(tree)))
    for path, spec in banked.items():
        for logical in view().logical_paths(path):
            expected = P(*spec[1:]) if path.startswith("params/layers_0_3") else spec
            assert alone[logical] == expected, logical
    assert banked["params/layers_0_3/mlp/gate_proj/kernel"] == P(None, "fsdp")
    assert banked["params/layers_0_3/self_attn/q_proj/kernel"] == P()


def test_undeclared_leaves_split_their_largest_dimension_over_fsdp():
    mesh = build_mesh(MeshSpec(fsdp=4))
    tree = {"a": jnp.zeros((3, 8, 16)), "b": jnp.zeros((8, 9)), "c": jnp.zeros((3, 5)), "d": jnp.zeros(())}
    assert specs(FULL.shardings(mesh, tree)) == {"a": P(None, None, "fsdp"), "b": P("fsdp"), "c": P(), "d": P()}


def test_moments_follow_their_parameters():
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2))
    variables = nn.meta.unbox(decoder())
    shardings = FULL.shardings(mesh, decoder())
    reference = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(named_leaves(variables).items(), jax.tree.leaves(shardings), strict=True)
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9))
    state = jax.eval_shape(optimizer.init, variables["params"])
    got = FULL.shardings_like(mesh, state, reference)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    seen = 0
    for path, sharding in named_leaves(got).items():
        owner = next((name for name in reference if path.endswith(name.removeprefix("params/"))), None)
        seen += owner is not None
        assert sharding == (reference[owner][1] if owner else NamedSharding(mesh, P())), path
    assert seen == 3 * len(reference)


def test_a_moment_of_another_shape_is_replicated():
    mesh = build_mesh(MeshSpec(fsdp=8))
    reference = {"params/w": ((8, 16), NamedSharding(mesh, P("fsdp")))}
    got = FULL.shardings_like(mesh, {"row": {"w": jnp.zeros(8)}, "mu": {"w": jnp.zeros((8, 16))}}, reference)
    assert specs(got) == {"row/w": P(), "mu/w": P("fsdp")}


def test_check_refuses_replication_and_names_paths_reason_and_a_mesh():
    mesh = build_mesh(MeshSpec(tensor=2))
    tree = decoder(N=9, K=3, D=32)
    with pytest.raises(LayoutRefused) as refusal:
        FULL.check(mesh, tree, FULL.shardings(mesh, tree), view())
    text = str(refusal.value)
    assert "tensor=2" in text
    assert "params/layers_0..3/self_attn/q_proj/kernel" in text
    assert "9 query heads do not divide tensor=2" in text
    assert "Use MeshSpec(fsdp=2)" in text
    advised = build_mesh(MeshSpec(fsdp=2))
    FULL.check(advised, tree, FULL.shardings(advised, tree))


def test_check_lists_the_five_largest():
    mesh = build_mesh(MeshSpec(fsdp=8))
    tree = {f"w{size}": box((3, size), (None, None)) for size in range(10, 17)}
    with pytest.raises(LayoutRefused) as refusal:
        FULL.check(mesh, tree, FULL.shardings(mesh, tree))
    listed = [line.split()[0] for line in str(refusal.value).splitlines() if line.startswith("  ")]
    assert listed == ["w16", "w15", "w14", "w13", "w12"]


def test_check_measures_the_fraction_against_the_tolerance():
    mesh = build_mesh(MeshSpec(fsdp=8))
    tree = {"a": box((8, 30), ("embed", None)), "b": box((10, 6), (None, None))}
    shardings = FULL.shardings(mesh, tree)
    Layout(min_shard=1, tolerance=0.2).check(mesh, tree, shardings)
    with pytest.raises(LayoutRefused, match=r"20\.0% of the parameters"):
        Layout(min_shard=1, tolerance=0.19).check(mesh, tree, shardings)
    Layout(min_shard=100, tolerance=0).check(mesh, tree, shardings)
    data = build_mesh()
    FULL.check(data, tree, FULL.shardings(data, tree))


def test_small_leaves_that_the_default_min_shard_leaves_whole_are_no_failure():
    mesh = build_mesh(MeshSpec(fsdp=8))
    layout = Layout()
    layout.check(mesh, decoder(), layout.shardings(mesh, decoder()))
    assert set(specs(layout.shardings(mesh, decoder())).values()) == {P()}


@pytest.mark.parametrize("spec", [MeshSpec(tensor=2), MeshSpec(fsdp=8), MeshSpec(fsdp=2, tensor=2)])
def test_scales_of_a_layer_do_not_count_as_replicated(spec):
    mesh = build_mesh(spec)
    FULL.check(mesh, decoder(), FULL.shardings(mesh, decoder()))


def test_rules_that_pin_everything_whole_are_refused():
    mesh = build_mesh(MeshSpec(fsdp=8))
    layout = Layout(rules={"embed": None, "mlp": None, "vocab": None, "head_dim": None}, min_shard=1)
    expected = r"100\.0%(.|\n)*gate_proj.*: a rule keeps 'embed' whole; a rule keeps 'mlp'"
    with pytest.raises(LayoutRefused, match=expected):
        layout.check(mesh, decoder(), layout.shardings(mesh, decoder()))


def test_a_rule_may_not_store_parameters_on_data_sequence_or_stage():
    mesh = build_mesh(MeshSpec(sequence=2))
    layout = Layout(rules={"embed": "sequence"}, min_shard=1)
    with pytest.raises(LayoutRefused, match=r"params/embed_tokens/embedding.*'sequence'.*fsdp, expert, tensor"):
        layout.shardings(mesh, decoder())
    layout = Layout(rules={"mlp": "stage"}, min_shard=1)
    with pytest.raises(LayoutRefused, match=r"'stage'.* may only split over.*, and layers and vocab over stage"):
        layout.shardings(build_mesh(MeshSpec(stage=2)), decoder(L=3))


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"host": ("opt_state",)}, r"host=\('opt_state',\): host placement is not available yet; use host=\(\)"),
        ({"host_parameters": ("params/layers_*",)}, r"use host_parameters=\(\)"),
        ({"tolerance": 2}, "fraction from 0 to 1"),
        ({"min_shard": 0}, "at least 1"),
        ({"rules": {"mlp": "tensr"}}, "Did you mean 'tensor'"),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused(fields, match):
    with pytest.raises(LayoutRefused, match=match):
        Layout(**fields)


def test_layouts_compare_and_hash_by_value():
    assert Layout(rules={"mlp": "fsdp"}) == Layout(rules={"mlp": "fsdp"}) != Layout()
    assert hash(Layout()) == hash(Layout())


def test_the_layers_of_a_bank_go_to_their_stages_whatever_their_size():
    mesh = build_mesh(MeshSpec(stage=2, fsdp=4))
    placed = specs(Layout(min_shard=2**30).shardings(mesh, decoder()))
    assert placed["params/layers_0_3/input_layernorm/scale"] == P("stage")
    assert placed["params/layers_0_3/mlp/gate_proj/kernel"] == P("stage")
    assert placed["params/embed_tokens/embedding"] == P()
    placed = specs(FULL.shardings(mesh, decoder()))
    assert placed["params/layers_0_3/mlp/gate_proj/kernel"] == P("stage", "fsdp")


def test_the_rows_of_tables_split_over_tensor_and_stages_as_far_as_they_divide():
    mesh = build_mesh(MeshSpec(stage=2, tensor=2, fsdp=2))
    for rows, want in ((64, P(("tensor", "stage"), "fsdp")), (66, P("tensor", "fsdp")), (65, P(None, "fsdp"))):
        placed = specs(FULL.shardings(mesh, decoder(V=rows)))
        assert placed["params/embed_tokens/embedding"] == want
    placed = specs(FULL.shardings(build_mesh(MeshSpec(stage=2, tensor=4)), decoder(V=66)))
    assert placed["params/embed_tokens/embedding"] == P("stage")


def test_rules_that_copy_the_layers_to_every_stage_are_refused():
    mesh, layout = build_mesh(MeshSpec(stage=2, fsdp=4)), Layout(rules={"layers": None}, min_shard=1)
    with pytest.raises(LayoutRefused, match=r"stage=2 share out the layers.*keep them whole.*\('layers', 'stage'\)"):
        layout.check(mesh, decoder(), layout.shardings(mesh, decoder()))


def test_the_summary_says_what_the_stages_hold():
    stage = FULL.explain(build_mesh(MeshSpec(stage=2)), decoder(), view()).axes[-1]
    assert str(stage).startswith("stage=2 splits embed_tokens, input_layernorm, mlp, self_attn")
    assert stage.whole == ("norm",)


def test_explain_gives_the_reason_by_heads():
    mesh = build_mesh(MeshSpec(fsdp=4, tensor=2))
    explained = FULL.explain(mesh, decoder(N=9, K=3), view())
    summary = explained.summary()
    assert "9 query heads / 3 kv heads do not divide tensor=2: attention stays whole" in summary
    tensor = next(axis for axis in explained.axes if axis.axis == "tensor")
    assert set(tensor.splits) == {"embed_tokens", "mlp"}
    assert "self_attn" in tensor.whole
    fsdp = next(axis for axis in explained.axes if axis.axis == "fsdp")
    assert "self_attn" in fsdp.splits


def test_explain_says_when_only_the_kv_heads_stay_whole():
    mesh = build_mesh(MeshSpec(tensor=4))
    summary = FULL.explain(mesh, decoder(N=4, K=2), view()).summary()
    assert "2 kv heads do not divide tensor=4: keys and values stay whole, queries split" in summary


def test_explain_counts_the_bytes_that_devices_hold():
    mesh = build_mesh(MeshSpec(fsdp=4, tensor=2))
    variables = jax.device_put(
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), nn.meta.unbox(decoder())), FULL.shardings(mesh, decoder())
    )
    held = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(variables):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    explained = FULL.explain(mesh, decoder(), view())
    assert set(held.values()) == {explained.bytes_per_device}
    assert explained.total_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(variables))


def test_the_table_has_a_row_per_leaf_with_layers_and_rule():
    table = FULL.explain(build_mesh(MeshSpec(fsdp=4, tensor=2)), decoder(), view()).table().splitlines()
    assert len(table) == 1 + len(jax.tree.leaves(nn.meta.unbox(decoder())))
    row = next(line for line in table if "gate_proj" in line)
    assert "params/layers_0..3/mlp/gate_proj/kernel x4" in row
    assert "32x64" in row
    assert "(fsdp, tensor)" in row
    assert "mlp -> tensor" in row


def test_a_rule_for_a_dimension_that_nothing_declares_is_refused():
    mesh, tree = build_mesh(MeshSpec(tensor=2)), decoder()
    for rules in ({"mpl": "tensor"}, (("mpl", "tensor"), ("embed", "fsdp"))):
        layout = Layout(rules=rules)
        with pytest.raises(LayoutRefused, match=r"rule for 'mpl'.*Did you mean 'mlp'\?"):
            layout.check(mesh, tree, layout.shardings(mesh, tree))
    own = Layout(rules={"activation_patches": "tensor"})
    own.check(mesh, tree, own.shardings(mesh, tree))


def test_the_reason_for_a_replicated_bank_is_not_that_its_layers_stay_together():
    mesh, tree, layout = build_mesh(MeshSpec(tensor=2)), decoder(), Layout(rules={"mlp": None}, min_shard=1)
    with pytest.raises(LayoutRefused) as refusal:
        layout.check(mesh, tree, layout.shardings(mesh, tree), view())
    assert "layers_0..3/mlp" in str(refusal.value)
    assert "'layers' whole" not in str(refusal.value)

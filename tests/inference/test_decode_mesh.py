"""Weights on a decode mesh: a view where devices hold their parts already, else moved leaf by leaf, nothing lost."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dew.inference.decode_mesh import (
    decode_mesh,
    decode_place,
    decode_view,
    holds_the_same,
    move_leaf_by_leaf,
    stored_axes,
)
from dew.nn.mlp import MlpSpec
from dew.nn.sharding import unboxed
from dew.placement import AXES, Layout, LayoutRefused, MeshSpec, build_mesh, bytes_per_device
from dew.placement.memory import live_bytes_per_device, shard_bytes
from dew.placement.stacks import stack_view
from dew.planning import planned_mesh
from dew.tree import named_leaves
from tests.tiny import tiny_decoder, tiny_layer

pytestmark = pytest.mark.usefixtures("quick_collections")
ROWS = 64


def weights(mesh, spec=("fsdp", "tensor")):
    """Three matrices and a vector, split where the spec's axes are."""
    split, whole = NamedSharding(mesh, PartitionSpec(*spec)), NamedSharding(mesh, PartitionSpec())
    values = {f"w{number}": jnp.arange(ROWS * 32.0).reshape(ROWS, 32) + number for number in range(3)}
    return {name: jax.device_put(leaf, split) for name, leaf in values.items()} | {
        "scale": jax.device_put(jnp.ones(32), whole)
    }


def sharded(mesh, axis, names):
    """Places of the weights: the last dimension over an axis."""
    return {
        name: NamedSharding(mesh, PartitionSpec(axis) if name == "scale" else PartitionSpec(None, axis))
        for name in names
    }


def pointers(leaf):
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}


class Owner:
    """Holds a tree, and measures the bytes alive each time it gets another."""

    def __init__(self, tree):
        self.tree = tree
        self.peak = 0

    def read(self):
        return self.tree

    def write(self, tree):
        gc.collect()
        self.peak = max(self.peak, sum(live_bytes_per_device().values()))
        self.tree = tree


def test_sequence_and_stage_become_data_and_no_device_changes_its_other_places():
    mesh = build_mesh(MeshSpec(fsdp=2, sequence=2, stage=2))
    folded = decode_mesh(mesh)
    assert dict(folded.shape) == {"data": 4, "expert": 1, "fsdp": 2, "tensor": 1, "sequence": 1, "stage": 1}
    for device in mesh.devices.flat:
        before, after = (
            dict(zip(AXES, np.argwhere(grid == device)[0], strict=True)) for grid in (mesh.devices, folded.devices)
        )
        assert {axis: before[axis] for axis in ("expert", "fsdp", "tensor")} == {
            axis: after[axis] for axis in ("expert", "fsdp", "tensor")
        }
        # Devices that were neighbours in a row's sequence hold neighbouring rows.
        assert after["data"] == (before["data"] * 2 + before["sequence"]) * 2 + before["stage"]
    plain = build_mesh(MeshSpec(fsdp=2, tensor=2))
    assert decode_mesh(plain) is plain


def test_stages_that_hold_weights_become_fsdp():
    mesh = build_mesh(MeshSpec(fsdp=2, sequence=2, stage=2))
    tree = weights(mesh, ("stage", "fsdp"))
    assert stored_axes(tree) == ("stage",)
    assert stored_axes(weights(mesh)) == ()
    folded = decode_mesh(mesh, stored=("stage",))
    assert {axis: size for axis, size in folded.shape.items() if size > 1} == {"data": 2, "fsdp": 4}
    assert [device.id for device in folded.devices[0, 0, :, 0, 0, 0]] == [0, 1, 4, 5]


def test_a_view_is_the_same_memory_and_leaves_the_weights_to_the_next_step():
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2, sequence=2))
    tree = weights(mesh)
    want = {name: np.array(leaf) for name, leaf in tree.items()}
    view = decode_view(tree, decode_mesh(mesh))
    for name, leaf in view.items():
        assert leaf.sharding.mesh.shape["data"] == 2
        assert pointers(leaf) == pointers(tree[name])
        np.testing.assert_array_equal(leaf, want[name])
    del view, leaf
    before = pointers(tree["w0"])
    step = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
    after = step(tree["w0"])
    assert tree["w0"].is_deleted()
    assert pointers(after) == before, "a view that is gone must not keep a step from reusing the memory"


def test_an_array_split_over_a_folded_axis_has_no_view():
    mesh = build_mesh(MeshSpec(stage=2, fsdp=4))
    with pytest.raises(LayoutRefused, match=r"w0 \(64, 32\) is split .* over an axis that decoding folds"):
        decode_view(weights(mesh, ("stage", "fsdp")), decode_mesh(mesh))


def test_an_array_split_over_data_that_grows_has_no_view_and_moves_where_it_is_said():
    mesh = build_mesh(MeshSpec(fsdp=2, sequence=2))
    folded, owner = decode_mesh(mesh), Owner(weights(mesh, ("data", "fsdp")))
    with pytest.raises(LayoutRefused, match=r"w0 \(64, 32\) is split .* turns data=2 into data=4, whose parts are oth"):
        decode_view(owner.tree, folded)
    move_leaf_by_leaf(owner.read, owner.write, sharded(folded, "data", owner.tree))
    assert decode_view(owner.tree, folded)["w0"].sharding == owner.tree["w0"].sharding


@pytest.mark.parametrize("device_set", [1, 4])
def test_an_array_that_is_not_on_the_mesh_is_refused_by_name(device_set):
    mesh = build_mesh(MeshSpec(fsdp=4, sequence=2))
    elsewhere = jax.devices()[0]
    if device_set > 1:
        elsewhere = NamedSharding(build_mesh(MeshSpec(fsdp=4), jax.devices()[:4]), PartitionSpec("fsdp"))
    tree = weights(mesh) | {"w1": jax.device_put(jnp.ones((64, 32)), elsewhere)}
    with pytest.raises(LayoutRefused, match=rf"w1 \(64, 32\) is placed by .* on {device_set} device.* mesh of 8 that"):
        decode_view(tree, decode_mesh(mesh))


def placed_bytes(tree, places):
    """Bytes on all devices of each leaf of a tree, were it placed so."""
    return {name: 8 * shard_bytes(leaf.shape, leaf.dtype, places[name]) for name, leaf in tree.items()}


@pytest.mark.parametrize("wanted", [MeshSpec(tensor=8), {"data": 2, "tensor": 4}, {"data": 8}])
def test_a_move_holds_one_leaf_twice_at_most_and_its_way_back_restores_every_bit(wanted):
    home = build_mesh(MeshSpec(fsdp=4, tensor=2))
    owner = Owner(weights(home))
    want = {name: np.array(leaf) for name, leaf in owner.tree.items()}
    homes = {name: leaf.sharding for name, leaf in owner.tree.items()}
    places = sharded(decode_mesh(home, wanted), "tensor", want)
    here, there = placed_bytes(want, homes), placed_bytes(want, places)
    most = sum(max(here[name], there[name]) for name in want) + max(*here.values(), *there.values())
    gc.collect()
    others = sum(live_bytes_per_device().values()) - sum(here.values())
    for target, frees in ((places, False), (homes, True)):
        owner.peak = 0
        move_leaf_by_leaf(owner.read, owner.write, target, frees=frees)
        assert {name: leaf.sharding for name, leaf in owner.tree.items()} == target
        assert 0 < owner.peak - others <= most
    for name, leaf in owner.tree.items():
        np.testing.assert_array_equal(leaf, want[name])
    gc.collect()
    assert sum(live_bytes_per_device().values()) - others == sum(here.values())


def test_whoever_holds_an_array_that_moves_away_keeps_it():
    home = build_mesh(MeshSpec(fsdp=8))
    owner = Owner(weights(home, ("fsdp",)))
    kept = owner.tree["w1"]
    places = sharded(home, "fsdp", owner.tree)
    move_leaf_by_leaf(owner.read, owner.write, places)
    np.testing.assert_array_equal(kept, owner.tree["w1"])


def test_an_array_that_was_made_to_be_given_up_is_freed_whoever_holds_it():
    home = build_mesh(MeshSpec(fsdp=8))
    owner = Owner(weights(home, ("fsdp",)))
    held = dict(owner.tree)
    move_leaf_by_leaf(owner.read, owner.write, sharded(home, "fsdp", owner.tree), frees=True)
    # The vector was whole: its parts are no view of it either.
    assert all(leaf.is_deleted() for leaf in held.values())
    assert not any(leaf.is_deleted() for leaf in owner.tree.values())


@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_at_any_leaf_loses_none(at):
    home = build_mesh(MeshSpec(fsdp=8))
    owner = Owner(weights(home, ("fsdp",)))
    want = {name: np.array(leaf) for name, leaf in owner.tree.items()}
    homes = {name: leaf.sharding for name, leaf in owner.tree.items()}
    places = sharded(home, "fsdp", want)
    writes = []

    def write(tree):
        if len(writes) == at:
            raise KeyboardInterrupt
        writes.append(tree)
        owner.write(tree)

    with pytest.raises(KeyboardInterrupt):
        move_leaf_by_leaf(owner.read, write, places)
    assert sum(leaf.sharding != homes[name] for name, leaf in owner.tree.items()) == at
    writes.clear()
    move_leaf_by_leaf(owner.read, owner.write, homes, frees=True)
    for name, leaf in named_leaves(owner.tree).items():
        assert leaf.sharding == homes[name]
        np.testing.assert_array_equal(leaf, want[name])


def test_devices_that_hold_the_same_parts_are_told_by_the_parts():
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2, sequence=2))
    leaf = weights(mesh)["w0"]
    folded = decode_mesh(mesh)
    assert holds_the_same(leaf, NamedSharding(folded, PartitionSpec("fsdp", "tensor")))
    assert not holds_the_same(leaf, NamedSharding(folded, PartitionSpec("tensor", "fsdp")))
    assert not holds_the_same(leaf, NamedSharding(build_mesh(MeshSpec(), jax.devices()[:4]), PartitionSpec()))


@pytest.mark.parametrize(
    "wanted, error, message",
    [
        ({"tensor": 3}, ValueError, r"does not divide the 8 given devices. Lower .* one of \[1, 2, 4, 8\]\.$"),
        (
            {"data": 3, "tensor": 2},
            ValueError,
            "data=3, but of 8 devices the other axes reserve 2, which leaves data=4",
        ),
        ({"tensr": 2}, ValueError, "Unknown mesh axis 'tensr'; known are data, .* Did you mean 'tensor'"),
        ({"data": "8"}, ValueError, "data must be a positive integer. Received: data='8'"),
        ({"data": 4.0, "tensor": 2}, ValueError, r"data must be a positive integer. Received: data=4\.0"),
        ({"tensor": 2.0}, ValueError, r"tensor must be a positive integer. Received: tensor=2\.0"),
        ("auto", TypeError, "mesh must be a MeshSpec, a mapping such as .* Received: mesh='auto'"),
        (4, TypeError, "mesh must be a MeshSpec, a mapping such as .* Received: mesh=4"),
        ({"sequence": 2}, LayoutRefused, "Decoding on sequence=2: it computes one token of a row at a time"),
        (MeshSpec(stage=4), LayoutRefused, "Decoding on stage=4"),
    ],
)
def test_meshes_that_cannot_decode_are_refused(wanted, error, message):
    with pytest.raises(error, match=message):
        decode_mesh(build_mesh(MeshSpec(fsdp=8)), wanted)


def test_a_decode_mesh_has_the_devices_of_the_model():
    few = build_mesh(MeshSpec(), jax.devices()[:4])
    with pytest.raises(ValueError, match=r"the mesh data=4 has 4 device\(s\), not the same 8 as the model's fsdp=8"):
        decode_mesh(build_mesh(MeshSpec(fsdp=8)), few)
    assert decode_mesh(few, {"tensor": 2}).devices.size == 4


def test_where_stages_decode_is_what_the_check_accepts_and_holds_least():
    layout = Layout(min_shard=1, tolerance=0)

    def place(features, mlp, mesh):
        layer = dataclasses.replace(tiny_layer(), mlp=MlpSpec(features=mlp))
        module = tiny_decoder(features=features, layers=(layer,) * 3, vocab_size=192)
        declared = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
        mesh = planned_mesh(mesh)
        found = decode_place(mesh, layout, declared, stack_view(module))
        trained = bytes_per_device(unboxed(declared), layout.shardings(mesh, declared))
        assert found.bytes == bytes_per_device(unboxed(declared), found.shardings)
        return {axis: size for axis, size in found.mesh.shape.items() if size > 1}, found.bytes / trained

    axes, grows = place(48, 96, {"stage": 3, "fsdp": 8})
    assert axes == {"fsdp": 24}
    assert grows < 1.01
    # A width of 32 does not divide by 24, and neither does anything else of a layer: three copies in eight parts.
    axes, grows = place(32, 64, {"stage": 3, "fsdp": 8})
    assert axes == {"data": 3, "fsdp": 8}
    assert 2 < grows <= 3
    assert place(32, 64, {"sequence": 2, "fsdp": 4}) == ({"data": 2, "fsdp": 4}, 1.0)
    assert place(32, 64, {"fsdp": 4}) == ({"fsdp": 4}, 1.0)
    with pytest.raises(
        LayoutRefused, match=r"(?s)Without its stage axis .*On mesh fsdp=21, .*name another mesh of the same"
    ):
        place(32, 64, {"stage": 3, "fsdp": 7})

"""Placed arrays equal the file's tensors, on every sharding, reading each part once and giving pages back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dew.placement.mesh import MeshSpec, build_mesh
from dew.pretrained import place as placing
from dew.pretrained.place import copy_tiled, place
from dew.pretrained.recipe import Cut, Recipe
from dew.pretrained.source import TensorInfo


class Held:
    """A source in memory that counts what is read and released."""

    def __init__(self, **tensors):
        self.tensors, self.bytes_read, self.reads, self.released = tensors, 0, [], []

    def names(self):
        return self.tensors

    def info(self, name):
        return TensorInfo(self.tensors[name].shape, self.tensors[name].dtype)

    def read(self, name, index):
        part = self.tensors[name][index]
        self.bytes_read += part.nbytes
        self.reads.append(name)
        return part

    def release(self, name):
        self.released.append(name)


CASES = {
    "matrix": ("F D -> D F", (16, 32), [("fsdp",), (None, "tensor"), ("fsdp", "tensor"), ("tensor", "fsdp"), ()]),
    "heads": ("(N H) D -> D N H", (16, 4, 8), [("fsdp", "tensor"), (None, "tensor", "fsdp"), (None, None, "fsdp"), ()]),
    "output": ("D (N H) -> N H D", (4, 8, 16), [("tensor", None, "fsdp"), (None, "fsdp"), ()]),
    "table": ("V D -> V D", (48, 16), [(("fsdp", "tensor"),), (None, "fsdp"), ()]),
    "vector": ("D -> D", (16,), [("fsdp",), ()]),
}


def in_leaf_order(recipe, tensor):
    sizes = [size for group in recipe.factors for size in group]
    return tensor.reshape(sizes).transpose(recipe.order)


@pytest.mark.parametrize("layers", [None, 3])
@pytest.mark.parametrize(
    "name, spec", [(name, spec) for name, (_, _, specs) in CASES.items() for spec in specs], ids=str
)
def test_every_shard_is_its_part_of_the_tensor_and_is_read_once(name, spec, layers):
    arrangement, shape, _ = CASES[name]
    mesh = build_mesh(MeshSpec(fsdp=4, tensor=2))
    full = shape if layers is None else (layers, *shape)
    recipe = Recipe("leaf", full, tuple(f"t{i}" for i in range(layers or 1)), layers is not None, arrangement)
    rng = np.random.default_rng(0)
    tensors = {tensor: rng.normal(size=recipe.tensor_shape).astype(np.float32) for tensor in recipe.sources}
    source = Held(**tensors)
    sharding = NamedSharding(mesh, PartitionSpec(*(() if layers is None else (None,)), *spec))
    leaf = place([recipe], {"leaf": sharding}, source)["leaf"]
    want = [in_leaf_order(recipe, tensors[tensor]) for tensor in recipe.sources]
    np.testing.assert_array_equal(leaf, want[0] if layers is None else np.stack(want))
    assert leaf.sharding == sharding
    assert source.released == list(recipe.sources)
    if name != "output":  # parts of every head's columns read the columns between them too
        assert source.bytes_read == leaf.nbytes, "replicated parts are read once, no part reads another's"


@pytest.mark.parametrize("stored", [jnp.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("wanted", [jnp.bfloat16, np.float16, np.float32, None])
@pytest.mark.parametrize("arrangement", ["F D -> D F", "F D -> F D"])
def test_dtypes_are_cast_as_jax_casts_them(stored, wanted, arrangement):
    tensor = np.random.default_rng(0).normal(size=(40, 40)).astype(stored)
    recipe = Recipe("leaf", (40, 40), ("t",), False, arrangement)
    sharding = NamedSharding(build_mesh(MeshSpec()), PartitionSpec())
    leaf = place([recipe], {"leaf": sharding}, Held(t=tensor), wanted)["leaf"]
    want = jnp.asarray(tensor).astype(stored if wanted is None else wanted)
    assert leaf.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(leaf, np.float32), np.asarray(in_leaf_order(recipe, want), np.float32))


def test_double_precision_is_stored_in_what_jax_computes_in():
    recipe = Recipe("leaf", (4,), ("a",), False, "D -> D")
    leaf = place([recipe], {"leaf": NamedSharding(build_mesh(), PartitionSpec())}, Held(a=np.arange(4.0)))["leaf"]
    assert leaf.dtype == jnp.float32
    np.testing.assert_array_equal(leaf, np.arange(4))


def test_layers_of_two_dtypes_take_the_wider():
    recipe = Recipe("leaf", (2, 4), ("a", "b"), True, "D -> D")
    source = Held(a=np.ones(4, np.float32), b=np.full(4, 2, jnp.bfloat16))
    leaf = place([recipe], {"leaf": NamedSharding(build_mesh(), PartitionSpec())}, source)["leaf"]
    assert leaf.dtype == jnp.float32
    np.testing.assert_array_equal(leaf, [[1] * 4, [2] * 4])


def test_small_pieces_and_one_part_at_a_time_give_the_same(monkeypatch):
    # What other backends do: parts pass through host memory in groups, and a tensor is read in many pieces.
    recipe = Recipe("leaf", (2, 16, 4, 8), ("a", "b"), True, "(N H) D -> D N H")
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(32, 16)).astype(np.float32) for name in "ab"}
    sharding = NamedSharding(build_mesh(MeshSpec(fsdp=8)), PartitionSpec(None, "fsdp"))
    monkeypatch.setattr(placing, "PIECE_BYTES", 100)
    monkeypatch.setattr(placing, "_groups", lambda parts, itemsize: ([part] for part in parts))
    source = Held(**tensors)
    leaf = place([recipe], {"leaf": sharding}, source)["leaf"]
    np.testing.assert_array_equal(leaf, np.stack([in_leaf_order(recipe, tensors[name]) for name in "ab"]))
    assert len(source.reads) > 16


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_too_large_for_a_piece_is_cut_along_the_next_dimension(rows, monkeypatch):
    recipe = Recipe("leaf", (4, 8, 5), ("t",), False, "E D (F 1) -> E D F", Cut(3, 1, 2))
    tensor = np.random.default_rng(0).normal(size=(4, 8, 10)).astype(np.float32)
    read, sizes = Held.read, []
    monkeypatch.setattr(Held, "read", lambda *given: sizes.append((part := read(*given)).shape) or part)
    monkeypatch.setattr(placing, "PIECE_BYTES", rows * 40)
    sharding = NamedSharding(build_mesh(MeshSpec(expert=2)), PartitionSpec("expert"))
    leaf = place([recipe], {"leaf": sharding}, Held(t=tensor))["leaf"]
    np.testing.assert_array_equal(leaf, tensor[..., 1::2])
    assert set(sizes) == ({(1, 1, 10)} if rows == 1 else {(1, 3, 10), (1, 2, 10)})


def test_a_read_that_fails_ends_the_load_and_leaves_no_array():
    class Failing(Held):
        def read(self, name, index):
            raise OSError("the disk is gone")

    before = len(jax.live_arrays())
    recipe = Recipe("leaf", (8, 8), ("t",), False, "F D -> D F")
    with pytest.raises(OSError, match="the disk is gone"):
        place([recipe], {"leaf": NamedSharding(build_mesh(), PartitionSpec())}, Failing(t=np.ones((8, 8))))
    assert len(jax.live_arrays()) <= before


def test_progress_counts_the_placed_bytes():
    told = []
    recipes = [Recipe(name, (8,), (name,), False, "D -> D") for name in "ab"]
    source = Held(a=np.ones(8, np.float32), b=np.ones(8, jnp.bfloat16))
    shardings = dict.fromkeys("ab", NamedSharding(build_mesh(), PartitionSpec()))
    place(recipes, shardings, source, progress=lambda done, total: told.append((done, total)))
    assert told == [(32, 48), (48, 48)]


def test_a_filled_buffer_becomes_the_array_of_a_cpu_device(monkeypatch):
    buffers, kept = [], placing.aligned
    monkeypatch.setattr(placing, "aligned", lambda *given: buffers.append(kept(*given)) or buffers[-1])
    recipe = Recipe("leaf", (16, 5), ("t",), False, "F D -> D F")
    sharding = NamedSharding(build_mesh(MeshSpec(fsdp=8)), PartitionSpec("fsdp"))
    leaf = place([recipe], {"leaf": sharding}, Held(t=np.ones((5, 16), np.float32)))["leaf"]
    pointers = [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
    assert sorted(pointers) == sorted(buffer.ctypes.data for buffer in buffers)


def test_a_placed_leaf_survives_donation_of_its_replicas():
    # Replicas share one host buffer; a step that donates them must not write through it.
    recipe = Recipe("leaf", (64,), ("t",), False, "D -> D")
    sharding = NamedSharding(build_mesh(), PartitionSpec())
    leaf = place([recipe], {"leaf": sharding}, Held(t=np.arange(64, dtype=np.float32)))["leaf"]
    step = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=sharding)
    for _ in range(3):
        leaf = step(leaf)
    for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(64) + 3)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.data())
def test_tiles_copy_every_order_of_dimensions(ndim, data):
    shape = tuple(data.draw(st.integers(1, 40)) for _ in range(ndim))
    order, stored = (data.draw(st.permutations(range(ndim))) for _ in range(2))
    values = np.arange(np.prod(shape), dtype=np.uint16).reshape([shape[axis] for axis in stored])
    values = values.transpose(np.argsort(stored))
    target = np.zeros([shape[axis] for axis in order], data.draw(st.sampled_from([np.uint16, np.float32])))
    copy_tiled(target.transpose(np.argsort(order)), values)
    np.testing.assert_array_equal(target, values.transpose(order))


class Process:
    """A sharding as one process of several sees it: some of the devices are its own."""

    def __init__(self, sharding, devices):
        self.sharding, self.devices = sharding, devices

    def addressable_devices_indices_map(self, shape):
        return {d: index for d, index in self.sharding.devices_indices_map(shape).items() if d in self.devices}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("spec", [("fsdp", None, "tensor"), (None, "tensor", None), ("fsdp",)])
def test_a_process_reads_the_bytes_that_its_devices_hold(monkeypatch, count, spec):
    # Fused: the leaf is rows 32 to 64 of 64, so its bytes are also half of the tensor's.
    recipe = Recipe("leaf", (16, 4, 8), ("t",), False, "(N H) D -> D N H", Cut(0, 32, 64))
    tensor = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    sharding = NamedSharding(build_mesh(MeshSpec(fsdp=4, tensor=2)), PartitionSpec(*spec))
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, sharding, arrays: arrays)
    devices, want = list(sharding.mesh.devices.flat), in_leaf_order(recipe, tensor[32:])
    for number in range(count):
        own = devices[number * 8 // count : (number + 1) * 8 // count]
        source = Held(t=tensor)
        arrays = place([recipe], {"leaf": Process(sharding, own)}, source)["leaf"]
        assert {array.device for array in arrays} == set(own)
        index = sharding.devices_indices_map(recipe.shape)
        for array in arrays:
            np.testing.assert_array_equal(array, want[index[array.device]])
        parts = {str(index[device]): want[index[device]].nbytes for device in own}
        assert source.bytes_read == sum(parts.values())
        assert source.bytes_read < tensor.nbytes


class Device:
    """A device that is no CPU, and copies that take until somebody waits for them."""

    platform = "other"


class Copies(Held):
    """Stands for JAX and for the file: counts the leaves on their way to devices each time another one is read."""

    def __init__(self, monkeypatch, **tensors):
        super().__init__(**tensors)
        self.under_way, self.seen = [], []
        monkeypatch.setattr(jax, "device_put", self.start)
        monkeypatch.setattr(jax, "block_until_ready", lambda arrays: [self.under_way.remove(each) for each in arrays])
        monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, sharding, arrays: arrays[0])

    def start(self, buffer, device):
        number = float(buffer.flat[0])
        self.under_way.append(number)
        return number

    def read(self, name, index):
        self.seen.append(len(self.under_way))
        return super().read(name, index)


class OnDevice:
    def addressable_devices_indices_map(self, shape):
        return {Device(): tuple(slice(None) for _ in shape)}


@pytest.mark.parametrize("leaves, nbytes", [(1, 100), (3, 300), (20, 10**9)])
def test_reading_runs_a_bounded_number_of_leaves_ahead_of_the_devices(monkeypatch, leaves, nbytes):
    # Leaves of 100 bytes each.
    copies = Copies(monkeypatch, **{str(number): np.full(25, number, np.float32) for number in range(20)})
    monkeypatch.setattr(placing, "TRANSFER_BYTES", nbytes)
    recipes = [Recipe(str(number), (25,), (str(number),), False, "D -> D") for number in range(20)]
    arrays = place(recipes, {recipe.path: OnDevice() for recipe in recipes}, copies)
    assert arrays == {str(number): float(number) for number in range(20)}
    # As many as the bytes allow are under way while the next is read, and never one more.
    assert copies.seen == [min(number, leaves) for number in range(20)]
    assert copies.under_way == []


def test_reading_runs_a_bounded_number_of_bytes_ahead_of_the_devices(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    monkeypatch.setattr(placing, "TRANSFER_BYTES", 100)
    transfers = placing._Transfers()
    for number, nbytes in enumerate([40, 40, 40, 300, 10]):
        transfers.add([number], nbytes)
        assert transfers.nbytes <= 100 or len(transfers._groups) == 1
    assert waited == [[0], [1], [2], [3]]
    transfers.finish()
    assert waited[-1] == [4]
    assert transfers.nbytes == 0

"""Byte counts equal what arrays hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dew.placement import MeshSpec, build_mesh, bytes_per_device, shard_bytes
from dew.placement.memory import format_bytes, live_bytes_per_device


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, ("fsdp", "tensor")), P("tensor", "fsdp")])
def test_shard_bytes_is_what_a_device_holds(spec):
    sharding = NamedSharding(build_mesh(MeshSpec(fsdp=4, tensor=2)), spec)
    array = jax.device_put(np.zeros((8, 16), np.float16), sharding)
    assert {shard.data.nbytes for shard in array.addressable_shards} == {shard_bytes((8, 16), "float16", sharding)}
    assert (
        bytes_per_device({"a": array, "b": jax.ShapeDtypeStruct((3,), jnp.bfloat16)})
        == shard_bytes((8, 16), "float16", sharding) + 6
    )


def test_shardings_may_be_given_apart_from_shapes():
    sharding = NamedSharding(build_mesh(MeshSpec(fsdp=8)), P("fsdp"))
    tree = {"a": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    assert bytes_per_device(tree, {"a": sharding}) == 32
    with pytest.raises(ValueError, match="1 leaves but 2 shardings"):
        bytes_per_device(tree, [sharding, sharding])


def test_live_bytes_grow_by_what_is_placed():
    before = live_bytes_per_device()
    mesh = build_mesh(MeshSpec(fsdp=8))
    array = jax.device_put(np.ones((80, 100), np.float32), NamedSharding(mesh, P("fsdp")))
    after = live_bytes_per_device()
    assert {after[device] - before.get(device, 0) for device in mesh.devices.flat} == {array.nbytes // 8}
    shards = [shard.data for shard in array.addressable_shards]
    view = jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, P(("fsdp", "tensor"))), shards)
    assert live_bytes_per_device() == after, "arrays that share memory take none"
    del view


def test_bytes_for_people():
    assert [format_bytes(n) for n in (12, 1500, 2.5e6, 3e9, 4e12)] == [
        "12 B",
        "1.50 kB",
        "2.50 MB",
        "3.00 GB",
        "4.00 TB",
    ]

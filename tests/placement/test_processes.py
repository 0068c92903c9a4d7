"""Joining a pool: only when the environment describes one, and wholly; two processes then agree with one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dew.placement import MeshSpec, build_mesh, initialize, is_primary, processes
from dew.placement.processes import host_pieces
from tests.processes import results, run_pool

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "DEW_PROCESS_COUNT", "DEW_PROCESS_ID")

PROGRAM = """
import json, sys
from dew.placement import MeshSpec, build_mesh, data_partition, initialize, is_primary, shard_batch
assert initialize()
assert initialize()
import jax, numpy as np
from jax.experimental import multihost_utils
mesh = build_mesh(MeshSpec(fsdp=4))
part = data_partition(mesh)
records = np.arange(16, dtype=np.float32)
batch = shard_batch(mesh, {"x": records[part.index :: part.count]})
total = jax.jit(lambda x: (x * x).sum())(batch["x"])
print("RESULT " + json.dumps([part.index, part.count, part.readers, float(total), is_primary(), len(jax.devices())]))
"""


def test_outside_a_pool_nothing_is_joined(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not initialize()
    assert is_primary()


@pytest.mark.parametrize(
    "values, match",
    [
        ({"DEW_PROCESS_COUNT": "2"}, "not .*JAX_COORDINATOR_ADDRESS.*DEW_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": "localhost:1", "DEW_PROCESS_COUNT": "two", "DEW_PROCESS_ID": "0"}, "'two'"),
        (
            {"JAX_COORDINATOR_ADDRESS": "localhost:1", "DEW_PROCESS_COUNT": "2", "DEW_PROCESS_ID": "2"},
            "DEW_PROCESS_ID=2",
        ),
    ],
)
def test_half_a_pool_is_refused(monkeypatch, values, match):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=match):
        initialize()


def test_two_processes_read_disjoint_shares_of_the_same_batch():
    found = results(run_pool(PROGRAM))
    assert found == [[0, 2, 1, 1240.0, True, 4], [1, 2, 1, 1240.0, False, 4]]


@pytest.mark.parametrize(
    "axes, spec, place",
    [
        ({"expert": 4, "fsdp": 2}, (None, "expert", "fsdp"), (1, 6)),
        ({"expert": 2, "stage": 2, "fsdp": 2}, ("stage", "expert", None, "fsdp"), (3, 0)),
        ({"stage": 4, "fsdp": 2}, ("stage",), (2,)),
        ({"stage": 4, "fsdp": 2}, ("stage",), (3, 1)),
        ({"expert": 2, "fsdp": 2}, (("expert", "fsdp"), None, None, "data"), (3, 1)),
        ({"fsdp": 8}, (None, None, "fsdp"), (3, 1)),
        ({"fsdp": 8}, (None, None, "fsdp"), ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_entry_comes_to_the_host_bit_for_bit_wherever_it_lies(axes, spec, place, dtype):
    values = np.random.default_rng(0).standard_normal((4, 8, 16, 2)).astype(jnp.dtype(dtype))
    values[..., :3, 0], values[..., 3, 0] = -0.0, np.nan
    leaf = jax.device_put(values, NamedSharding(build_mesh(MeshSpec(**axes)), PartitionSpec(*spec)))
    want = values[place]
    got = np.full(want.shape, 7, dtype)
    for index, part in host_pieces(leaf, place):
        got[index] = part
    bits = f"uint{8 * want.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize(
    "axes, spec", [({"expert": 4, "fsdp": 2}, (None, "expert", "fsdp")), ({"stage": 8}, ("stage",))]
)
def test_an_entry_is_taken_without_those_of_other_devices(axes, spec):
    mesh = build_mesh(MeshSpec(**axes))
    leaf = jax.ShapeDtypeStruct((8, 8, 64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    count = next(number for number, axis in enumerate(spec) if axis) + 1
    take = processes._indexed_where_held(mesh, spec, count)
    compiled = take.lower(leaf, jax.ShapeDtypeStruct((count,), jnp.int32)).compile()
    entry = 4 * int(np.prod(leaf.shape[count:])) // axes.get("fsdp", 1)
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * entry
    assert "all-gather" not in compiled.as_text()

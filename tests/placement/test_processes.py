"""Joining a pool: only when the environment describes one, and wholly; two processes then agree with one."""

import pytest

from dew.placement import initialize, is_primary
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

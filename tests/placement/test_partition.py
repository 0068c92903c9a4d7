"""Batches: each device gets its own rows, whole, and a batch that does not divide is refused."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from dew.placement import AXES, DataPartition, LayoutRefused, MeshSpec, build_mesh, data_partition, shard_batch
from dew.placement.mesh import device_grid
from dew.placement.partition import WholeBatch


@pytest.mark.parametrize(
    "spec", [MeshSpec(), MeshSpec(fsdp=4, tensor=2), MeshSpec(fsdp=2, expert=2), MeshSpec(tensor=8)]
)
def test_rows_split_over_data_expert_and_fsdp_only(spec):
    mesh = build_mesh(spec)
    host = {"tokens": np.arange(16 * 5, dtype=np.int32).reshape(16, 5), "weight": np.arange(16.0, dtype=np.float32)}
    batch = shard_batch(mesh, host)
    jax.tree.map(np.testing.assert_array_equal, batch, host)
    rows = 16 // (mesh.size // spec.tensor)
    for position in np.ndindex(mesh.devices.shape):
        shard = next(s for s in batch["tokens"].addressable_shards if s.device == mesh.devices[position])
        first = np.ravel_multi_index(position[:3], mesh.devices.shape[:3]) * rows
        np.testing.assert_array_equal(shard.data, host["tokens"][first : first + rows])


def test_positions_of_sequences_split_over_the_sequence_axis():
    mesh = build_mesh(MeshSpec(fsdp=2, sequence=4))
    shapes = {"tokens": (8, 12), "hidden": (8, 12, 5), "odd": (8, 13), "image": (8, 12, 12, 3), "row": (8,)}
    host = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    batch = shard_batch(mesh, host)
    jax.tree.map(np.testing.assert_array_equal, batch, host)
    parts = {name: array.addressable_shards[0].data.shape for name, array in batch.items()}
    assert parts == {
        "tokens": (4, 3), "hidden": (4, 3, 5), "odd": (4, 13), "image": (4, 12, 12, 3), "row": (4,)
    }  # fmt: skip
    stacked = shard_batch(mesh, {"tokens": np.zeros((3, 8, 12)), "mass": np.zeros(3)}, is_stacked=True)
    assert stacked["tokens"].addressable_shards[0].data.shape == (3, 4, 3)
    assert stacked["mass"].sharding.is_fully_replicated


def test_the_caller_may_reuse_its_buffers():
    # An aligned C-contiguous buffer is what JAX would alias on CPU.
    raw = np.empty(8 * 1024 * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = raw[start : start + 8 * 1024 * 4].view(np.int32).reshape(8, 1024)
    buffer[:] = 1
    batch = shard_batch(build_mesh(), {"tokens": buffer})
    buffer[:] = 2
    assert int(batch["tokens"].max()) == 1


def test_scalars_are_replicated():
    assert shard_batch(build_mesh(), np.float32(3)).sharding.is_fully_replicated


@pytest.mark.parametrize("rows, works", [(9, "8 or 16"), (3, "8"), (0, "8")])
def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do(rows, works):
    with pytest.raises(
        ValueError, match=rf"'tokens' has {rows} global rows.*8 row shards.*Use a batch of {works} rows"
    ):
        shard_batch(build_mesh(MeshSpec(fsdp=4)), {"tokens": np.zeros((rows, 4))})


def test_a_whole_batch_is_copied_to_every_device_whatever_its_rows():
    mesh = build_mesh(MeshSpec(fsdp=4))
    x = np.arange(6.0).reshape(3, 2)
    for stacked in (False, True):
        placed = shard_batch(mesh, WholeBatch({"x": x, "s": np.float32(2)}), is_stacked=stacked)
        assert all(leaf.sharding.is_fully_replicated for leaf in placed.values())
        np.testing.assert_array_equal(placed["x"], x)


def test_one_process_reads_everything():
    assert data_partition(build_mesh(MeshSpec(fsdp=4, tensor=2))) == DataPartition(0, 1, 1)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "cpu"


def fake_mesh(spec, processes, each, order=None):
    devices = [FakeDevice(process * each + local, process) for process in range(processes) for local in range(each)]
    grid = device_grid(spec, devices if order is None else [devices[index] for index in order])
    return types.SimpleNamespace(shape=dict(zip(AXES, grid.shape, strict=True)), axis_names=AXES, devices=grid)


@pytest.mark.parametrize("process", [0, 1, 2, 3])
def test_processes_read_the_share_their_devices_hold(monkeypatch, process):
    monkeypatch.setattr(jax, "process_index", lambda: process)
    assert data_partition(fake_mesh(MeshSpec(fsdp=4), 4, 2)) == DataPartition(process, 4, 1)
    # tensor=4 spans two processes, which then read one share.
    assert data_partition(fake_mesh(MeshSpec(tensor=4), 4, 2)) == DataPartition(process // 2, 2, 2)
    assert data_partition(fake_mesh(MeshSpec(tensor=8), 4, 2)) == DataPartition(0, 1, 4)


def test_row_shards_that_overlap_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    # Devices of process 0 hold rows {0, 1}, of process 1 rows {1, 2}, of process 2 rows {2, 0}.
    mesh = fake_mesh(MeshSpec(tensor=2), 3, 2, order=[0, 4, 1, 2, 3, 5])
    with pytest.raises(LayoutRefused, match="overlap"):
        data_partition(mesh)


def test_a_process_without_a_device_is_told(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 7)
    with pytest.raises(ValueError, match="Process 7 has no device"):
        data_partition(fake_mesh(MeshSpec(), 2, 2))


def test_a_partition_is_checked():
    with pytest.raises(ValueError, match="index=2, count=2"):
        DataPartition(2, 2)

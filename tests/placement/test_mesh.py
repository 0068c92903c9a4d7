"""Meshes: six axes always, factors that divide, devices where the caller put them."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from dew.placement.mesh import (
    AXES,
    MeshSpec,
    as_mesh,
    batch_divisor,
    build_mesh,
    device_grid,
    microbatches_of,
    stages_of,
)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "gpu"


def pool(processes: int, each: int) -> list[FakeDevice]:
    return [FakeDevice(process * each + local, process) for process in range(processes) for local in range(each)]


@pytest.mark.parametrize(
    "spec, shape",
    [
        (MeshSpec(), (8, 1, 1, 1, 1, 1)),
        (MeshSpec(fsdp=4), (2, 1, 4, 1, 1, 1)),
        (MeshSpec(fsdp=2, expert=4), (1, 4, 2, 1, 1, 1)),
        (MeshSpec(fsdp=4, sequence=2), (1, 1, 4, 1, 2, 1)),
        (MeshSpec(2, 1, 2), (2, 1, 2, 2, 1, 1)),
        (MeshSpec(stage=2, tensor=2, microbatches=4), (2, 1, 1, 2, 1, 2)),
    ],
)
def test_data_takes_what_is_left(spec, shape):
    mesh = build_mesh(spec)
    assert tuple(mesh.shape) == AXES
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_types == (AxisType.Auto,) * 6
    assert batch_divisor(mesh) == shape[0] * shape[1] * shape[2]


def test_given_devices_keep_their_order():
    devices = jax.devices()[::-1]
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2), devices)
    assert list(mesh.devices.flat) == devices


@pytest.mark.parametrize("field", ["fsdp", "expert", "tensor", "sequence", "stage", "replicas"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None, True])
def test_a_factor_is_a_positive_integer(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a positive integer. Received: {field}="):
        MeshSpec(**{field: value})


def test_microbatches_need_stages():
    with pytest.raises(ValueError, match="microbatches=4 needs a pipeline, but stage=1"):
        MeshSpec(microbatches=4)


@pytest.mark.parametrize(
    "mesh, asked, count",
    [
        (MeshSpec(stage=2), None, 2),
        (MeshSpec(stage=2, microbatches=4), None, 4),
        ({"stage": 2, "microbatches": 4}, None, 4),
        (MeshSpec(stage=2, microbatches=4), 6, 6),
        (None, None, 1),
    ],
)
def test_microbatches_are_those_asked_for_or_one_per_stage(mesh, asked, count):
    assert microbatches_of(mesh, asked) == count


def test_a_built_mesh_runs_the_microbatches_asked_for_beside_it():
    assert microbatches_of(build_mesh(MeshSpec(stage=2)), 4) == 4
    assert microbatches_of(build_mesh(MeshSpec(fsdp=2))) == microbatches_of(build_mesh(MeshSpec(fsdp=2)), 1) == 1


def test_a_built_mesh_with_stages_does_not_say_its_microbatches():
    built = build_mesh(MeshSpec(stage=2, microbatches=4))
    assert built is build_mesh(MeshSpec(stage=2)), "jax keeps one mesh of the same devices and axes"
    with pytest.raises(ValueError, match=r"built mesh with stage=2 does not say how many microbatches.*Give the MeshS"):
        microbatches_of(built)
    with pytest.raises(ValueError, match=r"microbatches=4 needs a pipeline, but the mesh has stage=1"):
        microbatches_of(build_mesh(MeshSpec(fsdp=2)), 4)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"must be a positive integer or None. Received: microbatches={wrong}"):
            microbatches_of(built, wrong)


def test_factors_that_do_not_divide_are_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"reserves 6 devices \(fsdp=3 \* tensor=2\).*8 visible.*\[1, 2, 4, 8\]"):
        build_mesh(MeshSpec(fsdp=3, tensor=2))
    with pytest.raises(ValueError, match="16 devices"):
        build_mesh(MeshSpec(fsdp=16))


def test_a_mapping_asserts_what_is_left_for_data():
    assert as_mesh({"data": 2, "fsdp": 4}) == build_mesh(MeshSpec(fsdp=4))
    with pytest.raises(ValueError, match="data=4, but of 8 devices the other axes reserve 4, which leaves data=2"):
        as_mesh({"data": 4, "fsdp": 4})
    with pytest.raises(ValueError, match=r"Unknown mesh axis 'tensr'.*Did you mean 'tensor'"):
        as_mesh({"tensr": 2})


def test_other_spellings_of_a_mesh():
    mesh = build_mesh(MeshSpec(fsdp=8))
    assert as_mesh(mesh) is mesh
    assert as_mesh(MeshSpec(fsdp=8)) == mesh
    assert as_mesh(None) == build_mesh()
    with pytest.raises(TypeError, match="Received: mesh=8"):
        as_mesh(8)
    with pytest.raises(ValueError, match="lacks"):
        as_mesh(Mesh(np.array(jax.devices()), ("data",)))


def crossings(grid: np.ndarray, axis: str) -> bool:
    """Whether neighbours along an axis sit in different processes."""
    moved = np.moveaxis(grid, AXES.index(axis), -1).reshape(-1, grid.shape[AXES.index(axis)])
    return any(a.process_index != b.process_index for line in moved for a, b in itertools.pairwise(line))


def test_replicas_keep_every_axis_but_data_inside_a_group():
    grid = device_grid(MeshSpec(fsdp=4, tensor=2, replicas=2), pool(2, 8))
    assert grid.shape == (2, 1, 4, 2, 1, 1)
    assert crossings(grid, "data")
    assert not crossings(grid, "fsdp")
    assert not crossings(grid, "tensor")
    assert sorted(device.id for device in grid.flat) == list(range(16))


def test_fsdp_may_cross_the_nodes_of_one_replica_and_tensor_may_not():
    grid = device_grid(MeshSpec(fsdp=8, tensor=2, replicas=2), pool(8, 4))
    assert grid.shape == (2, 1, 8, 2, 1, 1)
    assert crossings(grid, "fsdp")
    assert not crossings(grid, "tensor")


def test_replicas_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="replicas=3 must divide the 2 nodes"):
        device_grid(MeshSpec(replicas=3), pool(2, 3))
    with pytest.raises(ValueError, match=r"fsdp=2 does not divide over the 4 nodes of one replica.*Use fsdp=4"):
        device_grid(MeshSpec(fsdp=2, tensor=8, replicas=2), pool(8, 4))
    with pytest.raises(ValueError, match="unequal device counts"):
        device_grid(MeshSpec(replicas=2), [*pool(1, 3), FakeDevice(9, 1)])


def test_a_number_of_stages_may_be_of_any_kind_of_integer():
    assert stages_of({"stage": np.int64(2)}) == stages_of({"stage": 2}) == 2

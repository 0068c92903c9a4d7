"""Which devices go by which axis: `MeshSpec` says the factors, `build_mesh` lays the devices out.

All six axes always exist, size 1 included, in the order `AXES`. Axis types are Auto: GSPMD decides what is not pinned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dew.tree import closest

__all__ = [
    "AXES",
    "BATCH_AXES",
    "MeshSpec",
    "as_mesh",
    "batch_divisor",
    "build_mesh",
    "device_grid",
    "microbatches_of",
    "spec_of_factors",
    "stages_of",
]

AXES = ("data", "expert", "fsdp", "tensor", "sequence", "stage")
"""The axes of every mesh, outermost first: neighbours on the last axes are the closest devices."""

BATCH_AXES = ("data", "expert", "fsdp")
"""The axes that batch rows split over. Never tensor: every tensor shard reads the rows it computes a width of."""


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Reserve a factor of the device count for each parallel axis; data takes what is left.

    Attributes:
        fsdp: Shards of the parameters (ZeRO-3); also splits batch rows.
        expert: Shards of the expert dimension of sparse layers; also splits batch rows.
        tensor: Shards of the mlp width, the heads and the vocabulary.
        sequence: Shards of the token positions.
        stage: Pipeline stages of the layer stack.
        microbatches: Microbatches of a pipeline, any number; None means one per stage.
        replicas: Groups of nodes that data parallelism spans, keeping the other axes inside a group.

    Raises:
        ValueError: If a factor is not a positive integer, or there are microbatches without stages.
    """

    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    sequence: int = 1
    stage: int = 1
    microbatches: int | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("fsdp", "expert", "tensor", "sequence", "stage", "replicas"):
            _require_factor(name, getattr(self, name))
        if self.microbatches is None:
            return
        _require_factor("microbatches", self.microbatches)
        if self.stage == 1:
            raise ValueError(
                f"MeshSpec microbatches={self.microbatches} needs a pipeline, but stage=1. "
                "Give stage > 1 or leave microbatches out."
            )

    @property
    def reserved(self) -> int:
        """How many devices one data shard takes: the product of the parallel fields."""
        return self.fsdp * self.expert * self.tensor * self.sequence * self.stage


def _require_factor(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"MeshSpec {name} must be a positive integer. Received: {name}={value!r}")


def build_mesh(spec: MeshSpec = MeshSpec(), devices: Sequence[Any] | None = None) -> Mesh:
    """Lay devices out on the six axes.

    Args:
        spec: The factor of each axis.
        devices: Devices in the order they are laid out, row-major over `AXES`. None takes all visible devices in the
            order JAX gives for their topology.

    Returns:
        A mesh with all six axes, Auto typed.

    Raises:
        ValueError: If the spec's factors do not divide the devices.
    """
    return Mesh(device_grid(spec, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_grid(spec: MeshSpec, devices: Sequence[Any] | None = None) -> np.ndarray:
    """Arrange devices as a mesh's six-dimensional array.

    Args:
        spec: The factor of each axis.
        devices: As in `build_mesh`.

    Returns:
        Object array of devices, dimensions in the order of `AXES`.

    Raises:
        ValueError: If the factors, or the replicas, do not divide the devices.
    """
    ordered = devices is not None
    devices = list(jax.devices() if devices is None else devices)
    count, reserved = len(devices), spec.reserved
    if count == 0 or count % reserved:
        factors = {name: getattr(spec, name) for name in AXES if name != "data" and getattr(spec, name) > 1}
        product = " * ".join(f"{name}={factor}" for name, factor in factors.items())
        raise ValueError(
            f"MeshSpec reserves {reserved} devices ({product}), which does not divide the {count} "
            f"{'given' if ordered else 'visible'} devices. "
            f"Lower a field of MeshSpec so that their product is one of {_divisors(count)}."
            + ("" if ordered else _simulation(devices, reserved))
        )
    shape = (count // reserved, spec.expert, spec.fsdp, spec.tensor, spec.sequence, spec.stage)
    if spec.replicas > 1 or (len(_slices(devices)) > 1 and not ordered):
        return _grid_of_granules(spec, shape, _granules(devices))
    if ordered or devices[0].platform == "cpu":
        return _object_array(devices).reshape(shape)
    from jax.experimental import mesh_utils

    return mesh_utils.create_device_mesh(shape, devices)


def _simulation(devices: Sequence[Any], wanted: int) -> str:
    """Tell a person without accelerators how to try a mesh."""
    if not devices or devices[0].platform != "cpu":
        return ""
    return f" Or simulate devices: set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before JAX starts."


def _divisors(count: int) -> list[int]:
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0]


def _object_array(devices: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array


def _slices(devices: Sequence[Any]) -> set[Any]:
    return {getattr(device, "slice_index", None) for device in devices}


def _granules(devices: Sequence[Any]) -> list[list[Any]]:
    """Group devices by the fast network they share: a TPU slice where there are several, else a process."""
    attribute = "slice_index" if len(_slices(devices)) > 1 else "process_index"
    groups: dict[Any, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, attribute, 0), []).append(device)
    return [groups[key] for key in sorted(groups)]


def _grid_of_granules(spec: MeshSpec, shape: tuple[int, ...], granules: list[list[Any]]) -> np.ndarray:
    """Lay whole granules out so that only data, and fsdp where it must, crosses from one to the next."""
    count, sizes = len(granules), {len(granule) for granule in granules}
    if len(sizes) > 1:
        raise ValueError(
            f"The {count} nodes hold unequal device counts {sorted(sizes)}. Pass `devices` with as many of each node."
        )
    if count % spec.replicas or shape[0] % spec.replicas:
        raise ValueError(
            f"MeshSpec replicas={spec.replicas} must divide the {count} nodes and the data axis of {shape[0]}. "
            f"Use replicas={math.gcd(count, shape[0])}."
        )
    across_data = spec.replicas
    if spec.replicas == 1:
        across_data = math.gcd(count, shape[0])
    across_fsdp = count // across_data
    if spec.fsdp % across_fsdp:
        raise ValueError(
            f"MeshSpec fsdp={spec.fsdp} does not divide over the {across_fsdp} nodes of one replica, and only data "
            f"and fsdp may cross nodes. Use fsdp={across_fsdp * math.ceil(spec.fsdp / across_fsdp)} or more replicas."
        )
    inner = (shape[0] // across_data, shape[1], shape[2] // across_fsdp, *shape[3:])
    blocks = [_object_array(granule).reshape(inner) for granule in granules]
    rows = [
        np.concatenate(blocks[start : start + across_fsdp], axis=AXES.index("fsdp"))
        for start in range(0, count, across_fsdp)
    ]
    return np.concatenate(rows, axis=AXES.index("data"))


def as_mesh(mesh: Mesh | MeshSpec | Mapping[str, int] | None, devices: Sequence[Any] | None = None) -> Mesh:
    """Build the mesh that any accepted spelling stands for.

    Args:
        mesh: A mesh with the six axes, a `MeshSpec`, a mapping of its fields, or None for all devices on data. In a
            mapping, `data` asserts what is left for data parallelism.
        devices: Devices to build it over, as in `build_mesh`; a mesh has its own.

    Returns:
        The mesh.

    Raises:
        TypeError: If `mesh` is none of these.
        ValueError: If a key is unknown, the factors do not divide the devices, or `data` is not what is left.
    """
    if mesh is None:
        return build_mesh(devices=devices)
    if isinstance(mesh, MeshSpec):
        return build_mesh(mesh, devices)
    if isinstance(mesh, Mesh):
        missing = [axis for axis in AXES if axis not in mesh.shape]
        if missing:
            raise ValueError(
                f"The mesh has axes {tuple(mesh.axis_names)} and lacks {missing}; every mesh has the six axes {AXES}. "
                "Build it with dew.placement.build_mesh."
            )
        return mesh
    if isinstance(mesh, Mapping):
        spec, data = spec_of_factors(mesh)
        count = len(jax.devices() if devices is None else devices)
        if data is not None and data * spec.reserved != count:
            raise _leaves_other_data(spec, data, count)
        return build_mesh(spec, devices)
    raise TypeError(
        "mesh must be a MeshSpec, a mapping such as {'fsdp': 4, 'tensor': 2}, a jax Mesh or None. "
        f"Received: mesh={mesh!r}"
    )


def spec_of_factors(factors: Mapping[str, Any]) -> tuple[MeshSpec, int | None]:
    """Read a mapping of factors.

    Args:
        factors: Fields of `MeshSpec`, and `data` where what is left for it is asserted.

    Returns:
        The spec, and the data that is asserted.

    Raises:
        ValueError: If a key is unknown or a factor is not a positive integer.
    """
    known = ["data", *(field.name for field in dataclasses.fields(MeshSpec))]
    for name in factors:
        if name not in known:
            guess = closest(str(name), known)
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise ValueError(f"Unknown mesh axis {name!r}; known are {', '.join(known)}.{hint}")
    data = factors.get("data")
    if data is not None:
        _require_factor("data", data)
    return MeshSpec(**{name: factor for name, factor in factors.items() if name != "data"}), data


def _leaves_other_data(spec: MeshSpec, data: int, count: int) -> ValueError:
    divides = count % spec.reserved == 0
    left = f"which leaves data={count // spec.reserved}" if divides else "which does not divide them"
    return ValueError(
        f"mesh says data={data}, but of {count} devices the other axes reserve {spec.reserved}, {left}. "
        "Change a factor or leave 'data' out: it takes what is left."
    )


def batch_divisor(mesh: Mesh, microbatches: int = 1) -> int:
    """Count what a global batch is a multiple of: the shards that its rows split over, times the microbatches of each.

    Args:
        mesh: A mesh with the six axes.
        microbatches: Microbatches of the pipeline; 1 where there is none.
    """
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES) * microbatches


def stages_of(mesh: Mesh | MeshSpec | Mapping[str, Any] | None) -> int:
    """Say how many pipeline stages a mesh has, before it is built.

    Args:
        mesh: Any spelling that `as_mesh` takes.

    Returns:
        The number; 1 without a pipeline, or where `as_mesh` will refuse what is asked for.
    """
    if isinstance(mesh, Mapping):
        asked = mesh.get("stage", 1)
        return int(asked) if isinstance(asked, int | np.integer) and asked > 0 else 1
    return mesh.shape.get("stage", 1) if isinstance(mesh, Mesh) else getattr(mesh, "stage", 1)


def microbatches_of(mesh: Mesh | MeshSpec | Mapping[str, Any] | None, asked: int | None = None) -> int:
    """Say how many microbatches a pipeline on a mesh runs, before it is built: one per stage where nothing says it.

    A built mesh is its devices and axes, and keeps nothing of the microbatches of the spec that it was built from.

    Args:
        mesh: Any spelling that `as_mesh` takes.
        asked: Microbatches asked for beside the mesh; None takes those of the mesh.

    Returns:
        The number; 1 without a pipeline.

    Raises:
        ValueError: If the number asked for is not positive or needs stages that the mesh lacks, or if none is asked for
            and the mesh is built and has stages.
    """
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int | np.integer) or asked < 1):
        raise ValueError(f"microbatches must be a positive integer or None. Received: microbatches={asked!r}")
    stages = stages_of(mesh)
    if stages == 1:
        if asked not in (None, 1):
            raise ValueError(
                f"microbatches={asked} needs a pipeline, but the mesh has stage=1. "
                "Give it stage > 1 or leave microbatches out."
            )
        return 1
    if asked is not None:
        return asked
    if isinstance(mesh, Mesh):
        raise ValueError(
            f"A built mesh with stage={stages} does not say how many microbatches its pipeline runs. Give the MeshSpec "
            f"or the mapping that says it, or a Trainer microbatches= beside the mesh (one per stage is {stages})."
        )
    given = mesh.get("microbatches") if isinstance(mesh, Mapping) else getattr(mesh, "microbatches", None)
    return given or stages

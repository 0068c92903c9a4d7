"""Where things live: meshes, layouts, shardings, banks of layers, shares of a batch."""

from dew.placement.explain import Explanation
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.memory import bytes_per_device, shard_bytes
from dew.placement.mesh import AXES, BATCH_AXES, MeshSpec, as_mesh, batch_divisor, build_mesh
from dew.placement.partition import DataPartition, data_partition, shard_batch
from dew.placement.processes import initialize, is_primary
from dew.placement.rules import DEFAULT_RULES, Resolution, resolve
from dew.placement.stacks import Bank, StackView, stack_view

__all__ = [
    "AXES",
    "BATCH_AXES",
    "DEFAULT_RULES",
    "Bank",
    "DataPartition",
    "Explanation",
    "Layout",
    "LayoutRefused",
    "MeshSpec",
    "Resolution",
    "StackView",
    "as_mesh",
    "batch_divisor",
    "build_mesh",
    "bytes_per_device",
    "data_partition",
    "initialize",
    "is_primary",
    "resolve",
    "shard_batch",
    "shard_bytes",
    "stack_view",
]

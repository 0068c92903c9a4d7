"""Training on a mesh: the trainer, its loop and state, named optimizers, and where things live."""

from dew.checkpoint.save import Checkpoints
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.partition import DataPartition, data_partition, shard_batch
from dew.training.loop import Loop, NonFiniteLossError, StepResult
from dew.training.optimizer import make_optimizer
from dew.training.state import TrainState
from dew.training.trainer import Trainer

__all__ = [
    "Checkpoints",
    "DataPartition",
    "Layout",
    "Loop",
    "MeshSpec",
    "NonFiniteLossError",
    "StepResult",
    "TrainState",
    "Trainer",
    "build_mesh",
    "data_partition",
    "make_optimizer",
    "shard_batch",
]

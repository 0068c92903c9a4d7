"""Other people's weights: find, read, place and write checkpoints in the formats they are published in."""

from dew.pretrained.export import save_pretrained
from dew.pretrained.load import Pretrained, PretrainedConfig, describe, load_pretrained, load_variables
from dew.pretrained.source import CheckpointError

__all__ = [
    "CheckpointError",
    "Pretrained",
    "PretrainedConfig",
    "describe",
    "load_pretrained",
    "load_variables",
    "save_pretrained",
]

"""Run checkpoints: what a run needs to go on, restorable onto any mesh."""

from dew.checkpoint.save import Checkpoints

__all__ = ["Checkpoints"]

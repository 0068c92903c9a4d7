"""Sharded training and generation in JAX and Flax: one program, the same numbers on every mesh.

Names are imported when first used, so that `import dew` opens no backend and costs next to nothing. Where XLA_FLAGS
simulates devices, importing gives them threads (`dew.simulated_devices`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dew.simulated_devices import give_threads

if TYPE_CHECKING:
    from dew.data.dataset import Dataset
    from dew.inference.task import pipeline
    from dew.placement.layout import Layout
    from dew.placement.mesh import MeshSpec
    from dew.pretrained.load import load_pretrained
    from dew.training.trainer import Trainer

__all__ = ["Dataset", "Layout", "MeshSpec", "Trainer", "load_pretrained", "pipeline"]

_HOMES = {
    "Dataset": "dew.data.dataset",
    "Layout": "dew.placement.layout",
    "MeshSpec": "dew.placement.mesh",
    "Trainer": "dew.training.trainer",
    "load_pretrained": "dew.pretrained.load",
    "pipeline": "dew.inference.task",
}

give_threads()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dew' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Keras names for the dew engine: compile, fit, evaluate, predict and generate on any mesh.

Importing this package sets KERAS_BACKEND=jax when it is unset. Keras objects (optimizers, losses, metrics,
callbacks) are used as they are.
"""
# ruff: noqa: E402 - the backend is chosen before anything imports Keras

from dew_keras.backend import require_jax_backend

require_jax_backend()

from dew.inference.sampling import Greedy, Temperature, TopK, TopP
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec
from dew_keras.loading import load_model
from dew_keras.model import Model
from dew_keras.tensorboard import TensorBoard
from dew_keras.token_metrics import Perplexity

__all__ = [
    "Greedy",
    "Layout",
    "LayoutRefused",
    "MeshSpec",
    "Model",
    "Perplexity",
    "Temperature",
    "TensorBoard",
    "TopK",
    "TopP",
    "load_model",
]

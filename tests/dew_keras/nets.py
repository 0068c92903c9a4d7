"""Small modules and the Keras models that compute the same, for tests that run both."""

import contextlib

import flax.linen as nn
import jax
import keras
import numpy as np
import pytest

import dew_keras
from dew.placement.mesh import MeshSpec, build_mesh


class Linear(nn.Module):
    """One dense layer."""

    features: int = 3

    @nn.compact
    def __call__(self, x):
        """Apply it."""
        return nn.Dense(self.features, name="dense")(x)


class TwoHeads(nn.Module):
    """Two named outputs."""

    @nn.compact
    def __call__(self, x):
        """Apply both."""
        return {"a": nn.Dense(1, name="a")(x), "b": nn.Dense(3, name="b")(x)}


class Regularised(nn.Module):
    """Dropout, batch statistics and a loss term of its own."""

    @nn.compact
    def __call__(self, x, training=False):
        """Apply it."""
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not training, momentum=0.5)(x)
        x = nn.Dropout(0.5, deterministic=not training)(nn.relu(x))
        self.sow("losses", "activity", 0.01 * (x**2).mean())
        return nn.Dense(3)(x)


def rows(count=10, width=4, classes=3, seed=0):
    """Make inputs, targets and weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, width)).astype("float32")
    y = rng.normal(size=(count, classes)).astype("float32")
    weight = rng.uniform(0, 2, size=count).astype("float32")
    return x, y, weight


def kernel(width=4, features=3, seed=7):
    """Draw a kernel and a bias."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(width, features)).astype("float32"), rng.normal(size=features).astype("float32")


def weights_of(model):
    """Copy the weights of a model of either library; Keras' own get_weights warns under newer NumPy."""
    return [np.asarray(weight.value) for weight in model.weights] if hasattr(model, "weights") else model.get_weights()


def one_device():
    """Make the mesh that the others are compared with."""
    return build_mesh(MeshSpec(), jax.devices()[:1])


class StillFirst(keras.callbacks.Callback):
    """Keeps the weights in the first epoch, whose numbers can then be compared to the last places.

    Args:
        rate: Learning rate of the other epochs.
    """

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def on_epoch_begin(self, epoch, logs=None):
        """Assign the rate."""
        self.model.optimizer.learning_rate = self.rate if epoch else 0.0


def assert_same_logs(got, want, *, still=0, rtol=1e-6):
    """Compare the logs of two runs.

    Args:
        got: Numbers, or lists of a number per epoch, by name.
        want: The same of the run beside it.
        still: Epochs before the first update, which agree to 1e-6.
        rtol: For the later ones: their weights hold the rounding of the updates before.
    """
    assert got.keys() == want.keys()
    for name in want:
        ours, theirs = np.atleast_1d(got[name]), np.atleast_1d(want[name])
        np.testing.assert_allclose(ours[:still], theirs[:still], rtol=1e-6, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(ours[still:], theirs[still:], rtol=rtol, atol=1e-6, err_msg=name)


def _held(model):
    """Give what a refused verb must leave: arrays that training moves, and the objects that `compile` made."""
    engine, optimizer = model._engine, model.optimizer
    arrays = jax.device_get((engine.state, model.variables)), [np.asarray(v.value) for v in optimizer.variables]
    return arrays, (engine.compiled, optimizer, model.mesh, model.layout, model.module, model.history)


@contextlib.contextmanager
def refused(model, text, error=ValueError):
    """Check that what runs inside is refused with a text and leaves weights, optimizer and what is compiled."""
    arrays, objects = _held(model)
    with pytest.raises(error, match=text):
        yield
    arrays_now, objects_now = _held(model)
    jax.tree.map(np.testing.assert_array_equal, arrays_now, arrays)
    assert all(now is before for now, before in zip(objects_now, objects, strict=True))


def twins(features=3, mesh=None, layout=None, **compile_arguments):
    """Build a dew_keras model and a keras model with the same weights and settings."""
    weight, bias = kernel(features=features)
    ours = dew_keras.Model(Linear(features), variables={"params": {"dense": {"kernel": weight, "bias": bias}}})
    theirs = keras.Sequential([keras.Input((4,)), keras.layers.Dense(features)])
    theirs.set_weights([weight, bias])
    made = {name: value() if callable(value) else value for name, value in compile_arguments.items()}
    ours.compile(**made, mesh=mesh, layout=layout)
    theirs.compile(**{name: value() if callable(value) else value for name, value in compile_arguments.items()})
    return ours, theirs

"""Small modules and the Keras models that compute the same, for tests that run both."""

import flax.linen as nn
import keras
import numpy as np

import dew_keras


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


def twins(features=3, mesh=None, **compile_arguments):
    """Build a dew_keras model and a keras model with the same weights and settings."""
    weight, bias = kernel(features=features)
    ours = dew_keras.Model(Linear(features), variables={"params": {"dense": {"kernel": weight, "bias": bias}}})
    theirs = keras.Sequential([keras.Input((4,)), keras.layers.Dense(features)])
    theirs.set_weights([weight, bias])
    made = {name: value() if callable(value) else value for name, value in compile_arguments.items()}
    ours.compile(**made, mesh=mesh)
    theirs.compile(**{name: value() if callable(value) else value for name, value in compile_arguments.items()})
    return ours, theirs

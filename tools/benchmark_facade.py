"""Time `fit` beside `keras.Model.fit`: `python tools/benchmark_facade.py --samples 9`.

The same small classifier on data of the digits' shape, one device, in one run; warm epochs are interleaved and medians
compared. The bars: a warm epoch at most 1.0 times Keras', the first step and the traces at most Keras', and the bar on
the screen at most 3 % of a step in an epoch that lasts some redraws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import jax
import keras
import numpy as np
import tyro

import dew_keras

ROWS, FEATURES, CLASSES = 1797, 64, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to time.

    Attributes:
        batch: Rows of a batch.
        width: Width of the hidden layers.
        samples: Timed epochs of each contender.
        starts: Fresh models of each contender whose first step is timed.
        repeats: Times the rows are repeated in the epochs that tell what the bar on the screen costs.
    """

    batch: int = 32
    width: int = 64
    samples: int = 9
    starts: int = 5
    repeats: int = 40


calls: dict[str, int] = {}


class Classifier(nn.Module):
    """Two hidden layers; counts how often its Python runs, which is how often it is traced."""

    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Apply it."""
        calls["dew_keras"] = calls.get("dew_keras", 0) + 1
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(CLASSES)(x)


class Counted(keras.layers.Dense):
    """The first layer of the Keras model, which counts the same."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Apply it."""
        calls["keras"] = calls.get("keras", 0) + 1
        return super().call(inputs)


def build(kind: str, width: int) -> Any:
    """Make and compile a fresh model.

    Args:
        kind: "keras" or "dew_keras".
        width: Width of the hidden layers.
    """
    if kind == "keras":
        layers = [Counted(width, activation="relu"), keras.layers.Dense(width, activation="relu")]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])
    else:
        model = dew_keras.Model(Classifier(width))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss, metrics=["accuracy"])
    return model


def seconds(function: Callable[[], Any]) -> float:
    """Time one call whose output goes nowhere."""
    with contextlib.redirect_stdout(io.StringIO()):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start


def bar_cost(model: Any, x: np.ndarray, y: np.ndarray, options: Options) -> float:
    """Compare long epochs with and without the bar, pair by pair; returns the processor time it adds, as a part."""

    def used(verbose: int) -> float:
        start = time.process_time()
        seconds(lambda: model.fit(x, y, options.batch, verbose=verbose))
        return time.process_time() - start

    return statistics.median(used(1) / used(0) for _ in range(options.samples)) - 1


def main(options: Options) -> None:
    """Print the table.

    Args:
        options: What to time.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, ROWS)
    kinds = ("keras", "dew_keras")
    first: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.starts):
        for kind in kinds:
            # From nothing: Keras makes the weights where the model is built, dew_keras where they are first needed.
            jax.clear_caches()
            rows = x[: options.batch], y[: options.batch]
            first[kind].append(seconds(lambda k=kind, r=rows: build(k, options.width).fit(*r, options.batch)))
    models = {kind: build(kind, options.width) for kind in kinds}
    calls.clear()
    for model in models.values():
        seconds(lambda m=model: m.fit(x, y, options.batch, epochs=2))
    traces = dict(calls)
    epochs: dict[tuple[str, int], list[float]] = {(kind, verbose): [] for kind in kinds for verbose in (1, 0)}
    for _ in range(options.samples):
        for kind, verbose in epochs:
            model = models[kind]
            epochs[kind, verbose].append(seconds(lambda m=model, v=verbose: m.fit(x, y, options.batch, verbose=v)))
    steps = -(-ROWS // options.batch)
    medians = {key: statistics.median(values) for key, values in epochs.items()}
    titles = f"{'epoch ms':>9} {'min':>7} {'max':>7} {'us/step':>8} {'silent us/step':>15} {'first step s':>13}"
    print(f"{'':12} {titles} {'traces':>7}")
    for kind in kinds:
        shown = epochs[kind, 1]
        print(
            f"{kind:12} {1e3 * medians[kind, 1]:9.1f} {1e3 * min(shown):7.1f} {1e3 * max(shown):7.1f} "
            f"{1e6 * medians[kind, 1] / steps:8.0f} {1e6 * medians[kind, 0] / steps:15.0f} "
            f"{statistics.median(first[kind]):13.3f} {traces[kind]:7}"
        )
    ratio = medians["dew_keras", 1] / medians["keras", 1]
    start = statistics.median(first["dew_keras"]) / statistics.median(first["keras"])
    bar = bar_cost(models["dew_keras"], np.tile(x, (options.repeats, 1)), np.tile(y, options.repeats), options)
    print(f"warm epoch {ratio:.3f} of Keras (at most 1.0), first step {start:.3f} (at most 1.0)")
    print(f"the bar on the screen costs {bar:+.1%} of the processor time of a long epoch (at most 3 %)")


if __name__ == "__main__":
    main(tyro.cli(Options))

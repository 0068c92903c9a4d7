"""Time `fit` beside `keras.Model.fit`: `python tools/benchmark_facade.py --samples 9`.

A small classifier on data of the digits' shape, one device; warm epochs are interleaved, medians compared. Limits: a
warm epoch, the first step and the traces at most Keras'; the bar on the screen at most 3 % of a step of a long epoch,
in processor time, as wall time (shown beside) swings by more than that; and no wait for a step, which is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import jax
import keras
import numpy as np
import tyro

import dew_keras
from dew_keras import callbacks

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


@contextlib.contextmanager
def noted_waits() -> Iterator[list[bool]]:
    """Note of every step whose numbers the host copies, for logs and bar, whether they were still in the making.

    The loop's own wait, for the step before the last one, is not of these: it bounds the queue with every setting, and
    leaves the device a step to run.
    """
    waited: list[bool] = []
    added = callbacks._added

    def noting(sums: Any, leaves: list[jax.Array], steps: int) -> Any:
        waited.append(not all(leaf.is_ready() for leaf in leaves))
        return added(sums, leaves, steps)

    with mock.patch.object(callbacks, "_added", noting):
        yield waited


class BarCost(NamedTuple):
    """What the bar on the screen costs in a long epoch.

    Attributes:
        processor: Processor time with the bar, as a multiple of that without; the median of pairs.
        wall: Wall time, the same.
        step_us: Wall time of a step in microseconds, with the bar and without; medians.
        waits: Steps of an epoch whose numbers the host waited for, with the bar and without.
        steps: Steps of an epoch.
    """

    processor: float
    wall: float
    step_us: tuple[float, float]
    waits: tuple[int, int]
    steps: int

    def text(self) -> str:
        """Say it in three lines."""
        (shown, silent), (waits, silent_waits) = self.step_us, self.waits
        return (
            f"the bar on the screen costs {self.processor - 1:+.1%} of a long epoch's processor time (at most 3 %)\n"
            f"in wall time a step takes {self.wall:.3f} of one without the bar: {shown:.0f} and {silent:.0f} us\n"
            f"the host waited for the numbers of {waits} of {self.steps} steps ({waits / self.steps:.4f} a step); "
            f"without the bar, of {silent_waits}"
        )


def bar_cost(model: Any, x: np.ndarray, y: np.ndarray, options: Options) -> BarCost:
    """Compare long epochs with and without the bar, pair by pair.

    Args:
        model: The model.
        x: Inputs of a long epoch.
        y: Their classes.
        options: What to time.
    """

    def epoch(verbose: int) -> tuple[float, float]:
        start = time.process_time()
        wall = seconds(lambda: model.fit(x, y, options.batch, verbose=verbose))
        return time.process_time() - start, wall

    pairs = np.array([(epoch(1), epoch(0)) for _ in range(options.samples)])
    processor, wall = np.median(pairs[:, 0] / pairs[:, 1], axis=0)
    waits = []
    for verbose in (1, 0):  # noting costs time, so these epochs are not timed
        with noted_waits() as waited:
            epoch(verbose)
        waits.append(sum(waited))
    steps = -(-len(x) // options.batch)
    shown, silent = 1e6 * np.median(pairs[:, :, 1], axis=0) / steps
    return BarCost(float(processor), float(wall), (float(shown), float(silent)), (waits[0], waits[1]), steps)


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
    print(bar.text())


if __name__ == "__main__":
    main(tyro.cli(Options))

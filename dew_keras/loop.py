"""`fit`, `evaluate` and `predict` as consumers of the engine's training loop.

Entry points: `run_fit`, `run_evaluate`, `run_predict`. They call the hooks in Keras' order, copy what a hook
assigned into the next step, and read results late enough that no step is waited for.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dew.training.loop import Loop
from dew_keras.callbacks import MAX_PENDING, Hooks, RunningLogs
from dew_keras.inputs import Batch, Source
from dew_keras.interrupts import InterruptGate
from dew_keras.optimizers import CompiledOptimizer
from dew_keras.progress import Progress

_NOT_FINITE = (
    "The loss of epoch {epoch} is {loss}. Steps whose loss or gradient is not finite change no weights, and training "
    "goes on as in Keras. Stop it with keras.callbacks.TerminateOnNaN(), lower the learning rate, or clip the gradient."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """When and on what `fit` validates.

    Attributes:
        source: The validation data.
        steps: Batches of a pass, or None for all.
        frequency: Every how many epochs, or the epochs, counted from 1, that validate.
    """

    source: Source
    steps: int | None = None
    frequency: Any = 1

    def is_due(self, epoch: int) -> bool:
        """Say whether an epoch validates.

        Args:
            epoch: Number of the epoch, from 0.
        """
        if isinstance(self.frequency, int):
            return (epoch + 1) % self.frequency == 0
        return epoch + 1 in self.frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitRun:
    """What one `fit` works with.

    Attributes:
        loop: The engine's loop.
        gate: Holds an interrupt back while a step replaces the weights.
        optimizer: Whose rate is copied into the state when it was assigned.
        report: Turns sums into logs.
        score: Starts scoring a batch with given variables.
        accumulation: Batches per update.
        finish: Called once when the last epoch has ended, before the hooks of the end.
        progress: Where the fit is in its data.
    """

    loop: Loop
    gate: InterruptGate
    optimizer: CompiledOptimizer
    report: Callable[[Any], dict[str, float]]
    score: Callable[[Any, Any], Any]
    accumulation: int
    finish: Callable[[], None]
    progress: Progress


def run_fit(
    run: FitRun,
    model: Any,
    source: Source,
    hooks: Hooks,
    *,
    epochs: int,
    initial_epoch: int,
    validation: Validation | None,
) -> None:
    """Train epoch by epoch.

    Args:
        run: What the fit works with.
        model: Holds `stop_training`, which any hook may set.
        source: The training data.
        hooks: The callbacks.
        epochs: Number of the last epoch.
        initial_epoch: Number of the first epoch, from 0.
        validation: When and on what to validate.
    """
    model.stop_training = False
    model.count_batches(int(run.loop.state.step) // run.accumulation)
    hooks.begin("train")
    logs: dict[str, float] = {}
    warned = False
    # BackupAndRestore writes the epoch to go on with when training begins.
    first = run.progress.begin(source, model._initial_epoch or initial_epoch, initial_epoch)
    for epoch in range(first, epochs):
        hooks.epoch_begin(epoch)
        logs = _train_epoch(run, model, source, hooks, epoch)
        if not warned and not model.stop_training and not math.isfinite(logs.get("loss", 0.0)):
            warned = True
            warnings.warn(_NOT_FINITE.format(epoch=epoch + 1, loss=logs["loss"]), stacklevel=3)
        if validation is not None and validation.is_due(epoch):
            found = run_evaluate(
                lambda batch: run.score(run.loop.state.variables, batch),
                run.report,
                model,
                validation.source,
                hooks,
                steps=validation.steps,
            )
            logs.update({f"val_{name}": value for name, value in found.items()})
        run.progress.finish_epoch()
        hooks.epoch_end(epoch, logs)
        if model.stop_training:
            break
    run.finish()
    hooks.end("train", logs)


def _train_epoch(run: FitRun, model: Any, source: Source, hooks: Hooks, epoch: int) -> dict[str, float]:
    running = run.progress.logs(RunningLogs(run.report))
    start = run.progress.batch
    for number, batch in enumerate(source.open(epoch, start), start):
        hooks.batch_begin("train", number)
        _step(run, model, batch, running)
        run.progress.batch = number + 1
        hooks.batch_end("train", number, running)
        if model.stop_training:
            break
    return running.values()


def run_one_step(run: FitRun, model: Any, batch: Batch) -> dict[str, float]:
    """Train on one batch, without hooks.

    Args:
        run: What the fit works with.
        model: Counts the updates.
        batch: The batch.

    Returns:
        The logs of this batch alone.
    """
    running = RunningLogs(run.report)
    _step(run, model, batch, running)
    return running.values()


def _step(run: FitRun, model: Any, batch: Batch, running: RunningLogs) -> None:
    """Start a training step with the learning rate that was assigned last."""
    rate = run.optimizer.changed_rate()
    if rate is not None:
        run.loop.state = run.loop.state.with_learning_rate(rate)
    with run.gate.hold():
        result = run.loop.step(batch.data)
    running.add(result.statistics)
    model.count_batches(result.step // run.accumulation)


def run_evaluate(
    score: Callable[[Any], Any],
    report: Callable[[Any], dict[str, float]],
    model: Any,
    source: Source,
    hooks: Hooks,
    *,
    steps: int | None,
) -> dict[str, float]:
    """Score a pass over held-out data.

    Args:
        score: Starts scoring a host batch.
        report: Turns sums into logs.
        model: Holds `stop_evaluating`, which any hook may set.
        source: The data; every pass begins at its start.
        hooks: The callbacks.
        steps: Batches to score, or None for all.

    Returns:
        The logs of the pass.
    """
    model.stop_evaluating = False
    hooks.begin("test")
    running = RunningLogs(report)
    for number, batch in enumerate(_limited(source, steps)):
        hooks.batch_begin("test", number)
        running.add(score(batch.data))
        hooks.batch_end("test", number, running)
        if model.stop_evaluating:
            break
    logs = running.values()
    hooks.end("test", logs)
    return logs


def run_predict(apply: Callable[[Any], Any], model: Any, source: Source, hooks: Hooks, *, steps: int | None) -> Any:
    """Compute outputs of every row, in order.

    Args:
        apply: Starts computing the outputs of a host batch; whole on every device.
        model: Holds `stop_predicting`, which any hook may set.
        source: The data.
        hooks: The callbacks.
        steps: Batches to compute, or None for all.

    Returns:
        Host arrays in the structure of the outputs, exactly the rows given.
    """
    model.stop_predicting = False
    hooks.begin("predict")
    pending: collections.deque[tuple[int, int, Any]] = collections.deque()
    parts: list[Any] = []

    def finish() -> None:
        number, rows, outputs = pending.popleft()
        host = jax.tree.map(lambda leaf: np.asarray(leaf)[:rows], outputs)
        parts.append(host)
        hooks.batch_end("predict", number, {"outputs": host})

    for number, batch in enumerate(_limited(source, steps)):
        hooks.batch_begin("predict", number)
        pending.append((number, batch.rows, apply(batch.data)))
        # A callback of the batch before must have run when the next one begins; the bar alone may lag.
        while len(pending) > (0 if hooks.listens("predict") else MAX_PENDING):
            finish()
        if model.stop_predicting:
            break
    while pending:
        finish()
    hooks.end("predict", {})
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _limited(source: Source, steps: int | None) -> Iterator[Batch]:
    # No batch beyond the last is taken: a generator's would be lost.
    return itertools.islice(source.open(0), steps)

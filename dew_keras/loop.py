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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from dew.training.loop import Loop
from dew_keras.callbacks import MAX_PENDING, Hooks, Logs
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
class Pass:
    """What one pass over data works with.

    Attributes:
        logs: Its numbers.
        score: Starts scoring a host batch with given variables; not called in a training pass.
        finish: Called when the pass has ended.
    """

    logs: Logs
    score: Callable[[Any, Any], Any]
    finish: Callable[[], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitRun:
    """What one `fit` works with.

    Attributes:
        loop: The engine's loop.
        gate: Holds an interrupt back while a step replaces the weights.
        optimizer: Whose rate is copied into the state when it was assigned.
        training: Begins a pass over the training data.
        scoring: Begins a pass over held-out data.
        accumulation: Batches per update.
        per_execution: Batches per compiled program.
        finish: Called once when the last epoch has ended, before the hooks of the end.
        progress: Where the fit is in its data.
    """

    loop: Loop
    gate: InterruptGate
    optimizer: CompiledOptimizer
    training: Callable[[], Pass]
    scoring: Callable[[], Pass]
    accumulation: int
    per_execution: int
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
                run.scoring(),
                lambda: run.loop.state.variables,
                model,
                validation.source,
                hooks,
                steps=validation.steps,
                per_execution=run.per_execution,
            )
            logs.update({f"val_{name}": value for name, value in found.items()})
        run.progress.finish_epoch()
        logs = dict(sorted(logs.items()))
        # What callbacks add, as "learning_rate", goes into this epoch's record, and not to on_train_end.
        hooks.epoch_end(epoch, dict(logs))
        if model.stop_training:
            break
    if epochs:
        run.finish()
    hooks.end("train", logs)


def _train_epoch(run: FitRun, model: Any, source: Source, hooks: Hooks, epoch: int) -> dict[str, float]:
    training, start = run.training(), run.progress.batch
    logs = run.progress.begin_epoch(training.logs)
    for first, batches in _executions(source.open(epoch, start), run.per_execution, start):
        hooks.batch_begin("train", first)
        _step(run, batches, logs, room=run.per_execution)
        run.progress.batch = first + len(batches)
        hooks.batch_end("train", first + run.per_execution - 1, logs)
        if model.stop_training:
            break
    values = logs.values()
    training.finish()
    return values


def _executions(batches: Iterable[Batch], size: int, start: int = 0) -> Iterator[tuple[int, list[Batch]]]:
    """Group batches as they are executed: the number of the first one, and up to `size` of them."""
    stream = iter(batches)
    for first in itertools.count(start, size):
        group = list(itertools.islice(stream, size))
        if not group:
            return
        yield first, group


def run_one_step(run: FitRun, batch: Batch) -> dict[str, float]:
    """Train on one batch, without hooks.

    Args:
        run: What the fit works with.
        batch: The batch.

    Returns:
        The logs of this batch alone.
    """
    training = run.training()
    _step(run, [batch], training.logs, room=1)
    logs = training.logs.values()
    training.finish()
    return logs


def _step(run: FitRun, batches: list[Batch], logs: Logs, *, room: int) -> None:
    """Start training steps with the learning rate and count of updates that were assigned last."""
    state = run.loop.state
    fresh = run.optimizer.with_assigned(state)
    if fresh is not state:
        run.loop.state = fresh
    # A ragged batch is a group of its own, so two programs serve any length.
    groups = [batches] if len(batches) == 1 else [list(group) for _, group in itertools.groupby(batches, _form)]
    for group in groups:
        data = [batch.data for batch in group]
        with run.gate.hold():
            result = run.loop.step(*data, room=room)
        logs.add(result.statistics, steps=len(data))


def _form(batch: Batch) -> Any:
    """Give what batches of one program have in common."""
    leaves, structure = jax.tree.flatten(dict(batch.data))
    return type(batch.data), structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def run_evaluate(
    scoring: Pass,
    variables: Callable[[], Any],
    model: Any,
    source: Source,
    hooks: Hooks,
    *,
    steps: int | None,
    per_execution: int = 1,
) -> dict[str, float]:
    """Score a pass over held-out data.

    Args:
        scoring: The pass, just begun.
        variables: Returns the weights to score with.
        model: Holds `stop_evaluating`, which any hook may set.
        source: The data; every pass begins at its start.
        hooks: The callbacks.
        steps: Batches to score, or None for all.
        per_execution: Batches between two hooks.

    Returns:
        The logs of the pass.
    """
    model.stop_evaluating = False
    hooks.begin("test")
    for first, batches in _executions(_limited(source, steps), per_execution):
        hooks.batch_begin("test", first)
        for batch in batches:
            scoring.logs.add(scoring.score(variables(), batch.data))
        hooks.batch_end("test", first + per_execution - 1, scoring.logs)
        if model.stop_evaluating:
            break
    logs = scoring.logs.values()
    scoring.finish()
    hooks.end("test", logs)
    return logs


def run_predict(
    apply: Callable[[Any], Any], model: Any, source: Source, hooks: Hooks, *, steps: int | None, per_execution: int = 1
) -> Any:
    """Compute outputs of every row, in order.

    Args:
        apply: Starts computing the outputs of a host batch; whole on every device.
        model: Holds `stop_predicting`, which any hook may set.
        source: The data.
        hooks: The callbacks.
        steps: Batches to compute, or None for all.
        per_execution: Batches between two hooks.

    Returns:
        Host arrays in the structure of the outputs, exactly the rows given.
    """
    model.stop_predicting = False
    hooks.begin("predict")
    pending: collections.deque[tuple[int, list[tuple[int, Any]]]] = collections.deque()
    parts: list[Any] = []

    def finish() -> None:
        first, started = pending.popleft()
        outputs = [jax.tree.map(lambda leaf, rows=rows: np.asarray(leaf)[:rows], tree) for rows, tree in started]
        parts.extend(outputs)
        hooks.batch_end("predict", first + per_execution - 1, {"outputs": _concatenated(outputs)})

    for first, batches in _executions(_limited(source, steps), per_execution):
        hooks.batch_begin("predict", first)
        pending.append((first, [(batch.rows, apply(batch.data)) for batch in batches]))
        # A callback of the batch before must have run when the next one begins; the bar alone may lag.
        while len(pending) > (0 if hooks.listens("predict") else MAX_PENDING):
            finish()
        if model.stop_predicting:
            break
    while pending:
        finish()
    hooks.end("predict", {})
    return _concatenated(parts)


def _concatenated(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _limited(source: Source, steps: int | None) -> Iterator[Batch]:
    # No batch beyond the last is taken: a generator's would be lost.
    return itertools.islice(source.open(0), steps)

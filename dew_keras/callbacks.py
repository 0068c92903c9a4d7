"""Keras callbacks called in Keras' order, without making every step wait for the device.

Entry points: `Hooks`, `RunningLogs`. Logs are running means since the start of a pass; they are computed when a
callback reads them, and the progress bar shows the newest numbers that are there already.
"""

from __future__ import annotations

import collections
import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import keras
import numpy as np

# Not public, but what callbacks with mode='auto' look for in `model.metrics`.
from keras.src.trainers.compile_utils import MetricsList

from dew.placement.processes import is_primary
from dew_keras.arguments import flat_callbacks
from dew_keras.followers import followers
from dew_keras.pooling import FED_ROWS, FedPass, MetricRows

REDRAW_SECONDS = 0.05
MAX_PENDING = 2


class Logs(Protocol):
    """The numbers of one pass."""

    def add(self, statistics: Mapping[str, Any], *, steps: int = 1) -> None:
        """Take what started steps report, stacked where they ran as one program."""
        ...

    def start_with(self, sums: Mapping[str, Any]) -> None:
        """Begin with what the pass had when it was saved; empty for a pass from its start."""
        ...

    def sums(self) -> dict[str, Any]:
        """Return what `start_with` takes, waiting for the device."""
        ...

    def newest(self) -> dict[str, float]:
        """Return the numbers so far, without waiting for new steps where that is possible."""
        ...

    def values(self) -> dict[str, float]:
        """Return the numbers over all steps, waiting for the device."""
        ...

    def so_far(self) -> Callable[[], dict[str, float]]:
        """Return what computes the numbers over the steps until now, whenever it is called."""
        ...


class RunningLogs:
    """Sums of one pass, read from the device a few steps late.

    Args:
        report: Turns host sums into the numbers of the logs.
    """

    def __init__(self, report: Callable[[Mapping[str, Any]], dict[str, float]]) -> None:
        self._report = report
        self._pending: collections.deque[tuple[int, list[jax.Array], MetricRows | None]] = collections.deque()
        self._structure: Any = None
        self._sums: list[np.ndarray] = []
        self._rows: MetricRows | FedPass | None = None
        self._fed: list[np.ndarray] = []  # what metric objects held when the pass was saved
        self._count = 0

    def start_with(self, sums: Mapping[str, Any]) -> None:
        """Begin with what the pass had summed when it was saved.

        Args:
            sums: What `sums` returned; empty for a pass from its start.
        """
        found = dict(sums)
        self._fed = found.pop(FED_ROWS, {}).get("fed", [])
        if found:
            self._sums, self._structure = jax.tree.flatten(found)

    def sums(self) -> dict[str, Any]:
        """Return the host sums over all steps, in the statistics' structure, waiting for the device."""
        while self._pending:
            self._fold()
        found = jax.tree.unflatten(self._structure, self._sums) if self._sums else {}
        if isinstance(self._rows, MetricRows):
            self._rows = FedPass(self._rows.feed) + self._rows
        fed = self._fed if self._rows is None else self._rows.state()
        return {**found, FED_ROWS: {"fed": fed}} if fed else found

    def add(self, statistics: Mapping[str, Any], *, steps: int = 1) -> None:
        """Take what started steps report, and read what is surely done.

        Args:
            statistics: Sums by name, and the rows of metrics that are no sums, on the device.
            steps: Steps that ran as one program; their sums and rows are stacked.
        """
        sums = dict(statistics)
        rows = sums.pop(FED_ROWS, None)
        # Flat lists: this runs once a step, and walking the tree again would cost more than reading the numbers.
        structure: Any
        leaves, structure = jax.tree.flatten(sums)
        if self._sums and structure != self._structure:
            self._rename(sums)
        self._structure = structure
        self._pending.append((steps, leaves, rows))
        self._count += 1
        while len(self._pending) > MAX_PENDING:
            self._fold()

    def _rename(self, statistics: Mapping[str, Any]) -> None:
        """Bring sums under the keys of this model: Keras numbers the names of metric objects anew in every model."""
        begun = jax.tree.unflatten(self._structure, self._sums)
        names = {name: name if name in begun else _same_but_number(name, begun) for name in statistics}
        renamed = {name: begun.get(old) for name, old in names.items()}
        structure: Any = jax.tree.structure(dict(statistics))
        if jax.tree.structure(renamed) != structure or len(begun) != len(statistics):
            raise ValueError(
                f"The epoch was begun with the logs {sorted(begun)}; this model reports {sorted(statistics)}. Compile "
                "it with the same loss and metrics."
            )
        self._sums = jax.tree.leaves(renamed)

    def newest(self) -> dict[str, float]:
        """Return the means over the steps read so far, waiting only when there is none."""
        if not self._sums and self._pending:
            self._fold()
        return self._reported(self._sums)

    def values(self) -> dict[str, float]:
        """Return the means over all steps, waiting for the device."""
        while self._pending:
            self._fold()
        return self._reported(self._sums)

    def so_far(self) -> Callable[[], dict[str, float]]:
        """Return what computes the means over the steps until now, whenever it is called."""
        count, pending, sums = self._count, tuple(self._pending), self._sums
        if self._rows is not None or any(rows is not None for _, _, rows in pending):
            # Metric objects that are fed rows cannot go back to an earlier batch.
            found = self.values()
            return lambda: found

        def values() -> dict[str, float]:
            if self._count == count:
                return self.values()
            found = sums
            for steps, leaves, _ in pending:
                found = _added(found, leaves, steps)
            return self._reported(found)

        return values

    def _fold(self) -> None:
        steps, leaves, rows = self._pending.popleft()
        self._sums = _added(self._sums, leaves, steps)
        if rows is not None:
            rows = jax.tree.map(np.asarray, rows)
            for step in range(steps):
                one = rows if steps == 1 else jax.tree.map(lambda leaf, step=step: leaf[step], rows)
                if self._rows is None and self._fed:
                    self._rows = FedPass(one.feed, self._fed)
                self._rows = one if self._rows is None else self._rows + one

    def _reported(self, sums: list[np.ndarray]) -> dict[str, float]:
        if not sums:
            return {}
        statistics = jax.tree.unflatten(self._structure, sums)
        return self._report(statistics if self._rows is None else {**statistics, FED_ROWS: self._rows})


def _added(sums: list[np.ndarray], leaves: list[jax.Array], steps: int) -> list[np.ndarray]:
    # Double precision: a float32 sum over an epoch would drift from the exact mean.
    host = [np.asarray(leaf).astype(np.float64) for leaf in leaves]
    if steps > 1:
        host = [leaf.sum(axis=0) for leaf in host]
    return [a + b for a, b in zip(sums, host, strict=True)] if sums else host


class LazyLogs(dict):
    """A dict of logs that is filled when somebody looks into it.

    Args:
        compute: Gives the numbers.
    """

    def __init__(self, compute: Callable[[], Mapping[str, Any]]) -> None:
        # Not empty: the JSON encoder asks C for the size and reads nothing of an empty dict.
        super().__init__({"not computed yet": None})
        self._compute: Callable[[], Mapping[str, Any]] | None = compute

    def _fill(self) -> None:
        if self._compute is not None:
            compute, self._compute = self._compute, None
            super().clear()
            super().update(compute())

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)

    __hash__ = None  # type: ignore[assignment]


def _filling(name: str) -> Any:
    """Make the method of a dict that fills the logs first."""
    plain = getattr(dict, name)

    def method(self: LazyLogs, *args: Any, **kwargs: Any) -> Any:
        for logs in (self, *args):
            if isinstance(logs, LazyLogs):
                logs._fill()
        return plain(self, *args, **kwargs)

    return functools.wraps(plain)(method)


# All that looks into a dict or changes it. C code that is handed a dict takes its own way only while `__iter__` is
# dict's, so `dict(logs)` and `**logs` come through here too.
_LOOKING = """__contains__ __delitem__ __eq__ __getitem__ __ior__ __iter__ __len__ __ne__ __or__ __repr__ __reversed__
    __ror__ __setitem__ clear copy get items keys pop popitem setdefault update values"""
for _name in _LOOKING.split():
    setattr(LazyLogs, _name, _filling(_name))


class Hooks:
    """The callbacks of one verb.

    Args:
        callbacks: Keras callbacks, possibly in nested lists, or a `keras.callbacks.CallbackList`.
        model: What callbacks see as `self.model`.
        verbose: 0, 1, 2 or "auto".
        epochs: Number of the last epoch, for the text.
        steps: Batches of an epoch, or None when nobody knows.
        with_history: Whether to keep a History, as `fit` does.
    """

    def __init__(
        self,
        callbacks: Any,
        *,
        model: Any,
        verbose: Any = 0,
        epochs: int = 1,
        steps: int | None = None,
        with_history: bool = False,
    ) -> None:
        given = flat_callbacks(callbacks)
        self.callbacks = given if is_primary() else followers(given)
        self.history: Any = next((c for c in self.callbacks if isinstance(c, keras.callbacks.History)), None)
        self._bar: Any = next((c for c in self.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)), None)
        verbose = 1 if verbose == "auto" else verbose
        if self.history is None and with_history:
            self.history = keras.callbacks.History()
            self.callbacks.append(self.history)
        if self._bar is None and verbose and is_primary():
            self._bar = keras.callbacks.ProgbarLogger()
            self.callbacks.append(self._bar)
        self._model = model
        self._drawn = 0.0
        self._in_fit = with_history  # validation inside fit draws no bar of its own
        params = {"verbose": verbose, "epochs": epochs, "steps": steps}
        for callback in self.callbacks:
            callback.set_model(model)
            callback.set_params(params)
        self._batch_end = {
            phase: [c for c in self.callbacks if c is not self._bar and _listens(c, f"on_{phase}_batch_end")]
            for phase in ("train", "test", "predict")
        }

    def listens(self, phase: str) -> bool:
        """Say whether any callback but the bar acts at the end of a batch.

        Args:
            phase: "train", "test" or "predict".
        """
        return bool(self._batch_end[phase])

    def begin(self, phase: str) -> None:
        """Call `on_<phase>_begin`.

        Args:
            phase: "train", "test" or "predict".
        """
        if self.history is not None:  # not before: data that is refused leaves the history of the fit before
            self._model.history = self.history
        for callback in self.callbacks:
            getattr(callback, f"on_{phase}_begin")({})

    def end(self, phase: str, logs: dict[str, Any]) -> None:
        """Call `on_<phase>_end`.

        Args:
            phase: "train", "test" or "predict".
            logs: The last logs.
        """
        for callback in self.callbacks:
            getattr(callback, f"on_{phase}_end")(logs)

    def epoch_begin(self, epoch: int) -> None:
        """Call `on_epoch_begin`.

        Args:
            epoch: Number of the epoch, from 0.
        """
        for callback in self.callbacks:
            callback.on_epoch_begin(epoch, {})

    def epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Call `on_epoch_end`; what a callback writes into the logs is seen by the ones after it.

        Args:
            epoch: Number of the epoch, from 0.
            logs: Logs of the epoch, validation included.
        """
        for callback in self.callbacks:
            if isinstance(callback, keras.callbacks.EarlyStopping):
                # It holds the best weights for the rest of the fit: they stay where they are, sharded.
                with self._model.weights_on_devices():
                    callback.on_epoch_end(epoch, logs)
            else:
                callback.on_epoch_end(epoch, logs)

    def batch_begin(self, phase: str, batch: int) -> None:
        """Call `on_<phase>_batch_begin`.

        Args:
            phase: "train", "test" or "predict".
            batch: Number of the batch, from 0 in each epoch.
        """
        for callback in self.callbacks:
            getattr(callback, f"on_{phase}_batch_begin")(batch, logs={})

    def batch_end(self, phase: str, batch: int, logs: Logs | dict[str, Any]) -> None:
        """Call `on_<phase>_batch_end`, and redraw the bar when it is time.

        Args:
            phase: "train", "test" or "predict".
            batch: Number of the batch, from 0 in each epoch.
            logs: The pass so far; a dict is passed on as it is.
        """
        listeners = self._batch_end[phase]
        if listeners:
            seen = logs if isinstance(logs, dict) else LazyLogs(logs.so_far())
            for callback in listeners:
                getattr(callback, f"on_{phase}_batch_end")(batch, logs=seen)
        if self._bar is None or (self._in_fit and phase != "train"):
            return
        self._bar.seen = batch + 1
        now = time.perf_counter()
        if batch == 0 or now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            shown = {} if isinstance(logs, dict) else logs.newest()
            getattr(self._bar, f"on_{phase}_batch_end")(batch, shown)


class LossTracker(MetricsList):
    """Keras' mean of the loss, which also lists the metrics of `compile` where callbacks with mode="auto" look.

    Args:
        engine: The model's engine, which knows them once a batch showed the outputs.
    """

    def __init__(self, engine: Any) -> None:
        keras.metrics.Metric.__init__(self, name="loss")
        self._mean = keras.metrics.Mean(name="loss")
        self._engine = engine

    @property
    def metrics(self) -> list[Any]:
        """The metrics of `compile`; they know whether more or less is better."""
        known = getattr(self._engine.bound_objective, "metrics", None)
        language = () if self._engine.compiled is None else self._engine.compiled.language_metrics
        return [*([] if known is None else known.metrics), *map(language_metric, language)]

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add losses to the mean."""
        self._mean.update_state(values, sample_weight=sample_weight)

    def result(self) -> Any:
        """Return the mean."""
        return self._mean.result()

    def reset_state(self) -> None:
        """Start the mean again."""
        self._mean.reset_state()


def language_metric(name: str) -> Any:
    """Make the stand-in of a language model's own metric for `LossTracker`; it is never updated.

    Args:
        name: "perplexity" or "token_accuracy".
    """
    metric = keras.metrics.Mean(name)
    metric._direction = "down" if name == "perplexity" else "up"
    return metric


def _same_but_number(name: str, names: Mapping[str, Any]) -> str | None:
    base = re.sub(r"_\d+$", "", name)
    found = [other for other in names if re.sub(r"_\d+$", "", other) == base]
    return found[0] if len(found) == 1 else None


def _listens(callback: Any, name: str) -> bool:
    """Say whether a callback does anything at a hook; `on_batch_end` is forwarded to by the train hook."""
    names = (name, "on_batch_end") if name == "on_train_batch_end" else (name,)
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, n), "__func__", None) is not getattr(base, n) for n in names)

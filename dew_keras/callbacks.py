"""Keras callbacks called in Keras' order, without making every step wait for the device.

Entry points: `Hooks`, `RunningLogs`. Logs are running means since the start of a pass; they are computed when a
callback reads them, and the progress bar shows the newest numbers that are there already.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import keras
import numpy as np

from dew.placement.processes import is_primary
from dew_keras.pooling import FED_ROWS, FedPass, MetricRows

REDRAW_SECONDS = 0.05
MAX_PENDING = 2


class Logs(Protocol):
    """The numbers of one pass."""

    def add(self, statistics: Mapping[str, Any], *, steps: int = 1) -> None:
        """Take what started steps report, stacked where they ran as one program."""
        ...

    def newest(self) -> dict[str, float]:
        """Return the numbers so far, without waiting for new steps where that is possible."""
        ...

    def values(self) -> dict[str, float]:
        """Return the numbers over all steps, waiting for the device."""
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

    def add(self, statistics: Mapping[str, Any], *, steps: int = 1) -> None:
        """Take what started steps report, and read what is surely done.

        Args:
            statistics: Sums by name, and the rows of metrics that are no sums, on the device.
            steps: Steps that ran as one program; their sums and rows are stacked.
        """
        sums = dict(statistics)
        rows = sums.pop(FED_ROWS, None)
        # Flat lists: this runs once a step, and walking the tree again would cost more than reading the numbers.
        leaves, self._structure = jax.tree.flatten(sums)
        self._pending.append((steps, leaves, rows))
        while len(self._pending) > MAX_PENDING:
            self._fold()

    def newest(self) -> dict[str, float]:
        """Return the means over the steps read so far, waiting only when there is none."""
        if not self._sums and self._pending:
            self._fold()
        return self._reported()

    def values(self) -> dict[str, float]:
        """Return the means over all steps, waiting for the device."""
        while self._pending:
            self._fold()
        return self._reported()

    def _fold(self) -> None:
        # Double precision: a float32 sum over an epoch would drift from the exact mean.
        steps, leaves, rows = self._pending.popleft()
        host = [np.asarray(leaf).astype(np.float64) for leaf in leaves]
        if steps > 1:
            host = [leaf.sum(axis=0) for leaf in host]
        self._sums = [a + b for a, b in zip(self._sums, host, strict=True)] if self._sums else host
        if rows is not None:
            rows = jax.tree.map(np.asarray, rows)
            for step in range(steps):
                one = rows if steps == 1 else jax.tree.map(lambda leaf, step=step: leaf[step], rows)
                self._rows = one if self._rows is None else self._rows + one

    def _reported(self) -> dict[str, float]:
        if not self._sums:
            return {}
        statistics = jax.tree.unflatten(self._structure, self._sums)
        return self._report(statistics if self._rows is None else {**statistics, FED_ROWS: self._rows})


class LazyLogs(dict):
    """A dict of logs that is filled when somebody looks into it.

    Args:
        compute: Gives the numbers.
    """

    def __init__(self, compute: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self._compute: Callable[[], Mapping[str, Any]] | None = compute

    def _filled(self) -> dict:
        if self._compute is not None:
            compute, self._compute = self._compute, None
            super().update(compute())
        return self

    def __getitem__(self, key: str) -> Any:
        self._filled()
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._filled()
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[str]:
        self._filled()
        return super().__iter__()

    def __len__(self) -> int:
        self._filled()
        return super().__len__()

    def __contains__(self, key: object) -> bool:
        self._filled()
        return super().__contains__(key)

    def __eq__(self, other: object) -> bool:
        self._filled()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        self._filled()
        return super().__repr__()

    def keys(self) -> Any:
        """Return the names."""
        self._filled()
        return super().keys()

    def values(self) -> Any:
        """Return the numbers."""
        self._filled()
        return super().values()

    def items(self) -> Any:
        """Return names and numbers."""
        self._filled()
        return super().items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number or the default."""
        self._filled()
        return super().get(key, default)

    def copy(self) -> dict:
        """Return a plain dict."""
        return dict(self.items())

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add or replace numbers."""
        self._filled()
        super().update(*args, **kwargs)

    def pop(self, *args: Any) -> Any:
        """Take a number out."""
        self._filled()
        return super().pop(*args)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return a number, set first where it is missing."""
        self._filled()
        return super().setdefault(key, default)


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
        self.callbacks = _flat(callbacks)
        self.history: Any = next((c for c in self.callbacks if isinstance(c, keras.callbacks.History)), None)
        self._bar: Any = next((c for c in self.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)), None)
        verbose = 1 if verbose == "auto" else verbose
        if self.history is None and with_history:
            self.history = keras.callbacks.History()
            self.callbacks.append(self.history)
        if self._bar is None and verbose and is_primary():
            self._bar = keras.callbacks.ProgbarLogger()
            self.callbacks.append(self._bar)
        self._drawn = 0.0
        self._in_fit = with_history  # validation inside fit draws no bar of its own
        if self.history is not None:
            model.history = self.history
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
            seen = logs if isinstance(logs, dict) else LazyLogs(logs.values)
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


def _flat(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if isinstance(callbacks, list | tuple):
        return [found for item in callbacks for found in _flat(item)]
    return [callbacks]


def _listens(callback: Any, name: str) -> bool:
    """Say whether a callback does anything at a hook; `on_batch_end` is forwarded to by the train hook."""
    names = (name, "on_batch_end") if name == "on_train_batch_end" else (name,)
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, n), "__func__", None) is not getattr(base, n) for n in names)

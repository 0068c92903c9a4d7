"""Keras metrics over devices, padded rows and the epoch, with the numbers that Keras computes.

Entry points: `check_metric_names` at compile, `MetricSet` when outputs are known. Each batch gives what it adds to a
metric's state where such sums are exact, and its rows where they are not; see `pooling.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from dew.objectives.base import Ratio
from dew_keras.names import UniqueNames, display_name, unknown_name
from dew_keras.outputs import Output, broadcast_rows, per_output, target_kind
from dew_keras.pooling import FED_ROWS, MetricFeed, MetricRows, MetricSum, assign_all, is_additive
from dew_keras.token_metrics import Perplexity

ACCURACY = ("accuracy", "acc")
CROSS_ENTROPY = ("crossentropy", "ce")
# Compile-time words that Keras resolves by the outputs' shapes, and the class for each kind of target.
ACCURACY_CLASSES = {
    "binary": keras.metrics.BinaryAccuracy,
    "sparse": keras.metrics.SparseCategoricalAccuracy,
    "categorical": keras.metrics.CategoricalAccuracy,
}


# Names of a language model's metrics, for modules whose predictions are logits of tokens.
TOKEN_METRICS = {"perplexity": Perplexity, "token_accuracy": keras.metrics.SparseCategoricalAccuracy}


def metric_names() -> list[str]:
    """List the words that `metrics=` understands."""
    public = [name for name in dir(keras.metrics) if not name.startswith("_")]
    functions = [name for name in public if name not in ("get", "serialize", "deserialize")]
    short = ["mse", "mae", "mape", "msle", "cosine_similarity", "log_cosh", "kld", "bce"]
    return [*functions, *short, *ACCURACY, *CROSS_ENTROPY, *TOKEN_METRICS]


def check_metric_names(metrics: Any, argument: str) -> None:
    """Refuse unknown metric names before anything is built.

    Args:
        metrics: What `compile` was given.
        argument: The argument's name, for the error.

    Raises:
        ValueError: If a name means nothing, or the argument is neither list, tuple nor dict.
    """
    if metrics is None:
        return
    if not isinstance(metrics, list | tuple | dict):
        raise ValueError(
            f"Expected `{argument}` argument to be a list, tuple, or dict. "
            f"Received instead: {argument}={metrics} of type {type(metrics)}"
        )
    for item in jax.tree.leaves(metrics, is_leaf=lambda node: not isinstance(node, list | tuple | dict)):
        if isinstance(item, str):
            _named_metric(item, "sparse")
        elif item is not None and not callable(item):
            raise ValueError(f"Could not interpret metric identifier. Received: {argument}={item!r}")


def _named_metric(name: str, kind: str) -> Any:
    if name.lower() in ACCURACY:
        return ACCURACY_CLASSES[kind](name=name)
    if name.lower() in TOKEN_METRICS:
        return TOKEN_METRICS[name.lower()](name=name)
    if name.lower() in CROSS_ENTROPY:
        kind = "sparse_categorical" if kind == "sparse" else kind
        name = f"{kind}_crossentropy"
    try:
        return keras.metrics.get(name)
    except ValueError as error:
        raise unknown_name("metric", name, metric_names()) from error


@dataclasses.dataclass(frozen=True)
class _Tracked:
    key: str
    metric: Any
    output: int
    is_weighted: bool


class MetricSet:
    """The metrics of a compiled model, bound to its outputs.

    Args:
        metrics: Metrics that ignore sample weights, as `compile` takes them.
        weighted_metrics: Metrics that use them.
        outputs: The outputs.
    """

    def __init__(self, metrics: Any, weighted_metrics: Any, outputs: Sequence[Output]) -> None:
        tracked = _tracked(metrics, weighted_metrics, outputs)
        self._all = sorted(tracked, key=lambda t: t.key) if len(outputs) > 1 and outputs[0].name else tracked
        self._added = [t for t in tracked if is_additive(t.metric, outputs[t.output])]
        self._feed = MetricFeed({t.key: (t.metric, t.output, t.is_weighted) for t in tracked if t not in self._added})
        self._is_fed = len(self._added) < len(tracked)
        for item in self._added:
            _build_state(item.metric, outputs[item.output])
        self._zero = {t.key: [np.asarray(v) for v in t.metric.stateless_reset_state()] for t in self._added}
        self._results: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """Log keys in Keras' order: as given, and sorted where outputs have names."""
        return [tracked.key for tracked in self._all]

    @property
    def metrics(self) -> list[Any]:
        """The Keras metric objects in the same order."""
        return [tracked.metric for tracked in self._all]

    def statistics(
        self, targets: Sequence[Any], predictions: Sequence[Any], weights: Sequence[Any], rows: Any
    ) -> dict[str, Ratio | MetricSum | MetricRows]:
        """Compute what one batch tells every metric; traced.

        Args:
            targets: One array per output, rows first.
            predictions: One array per output, rows first.
            weights: Sample weights per output, or None.
            rows: float [B], 0 where a row is padding; None when no row is.

        Returns:
            Sums by log key, where a plain mean gives its total and count as a ratio, and the rows for all metrics
            whose states do not add up.
        """
        found: dict[str, Ratio | MetricSum | MetricRows] = {}
        for tracked in self._added:
            y, y_pred = targets[tracked.output], predictions[tracked.output]
            weight = weights[tracked.output] if tracked.is_weighted else None
            if rows is not None:
                weight = rows if weight is None else weight * broadcast_rows(rows, weight)
            start = tracked.metric.stateless_reset_state()
            if weight is None:
                state = tracked.metric.stateless_update_state(start, y, y_pred)
            else:
                state = tracked.metric.stateless_update_state(start, y, y_pred, sample_weight=weight)
            added = [new - old for new, old in zip(state, start, strict=True)]
            found[tracked.key] = Ratio(*added) if _is_mean(tracked.metric) else MetricSum(tuple(added))
        if self._is_fed:
            found[FED_ROWS] = self._feed.rows(targets, predictions, weights, rows)
        return found

    def update(self, targets: Sequence[Any], predictions: Sequence[Any], weights: Sequence[Any]) -> None:
        """Update the metric objects themselves with one batch.

        Args:
            targets: One array per output, rows first.
            predictions: One array per output, rows first.
            weights: Sample weights per output, or None.
        """
        for tracked in self._all:
            arrays = targets[tracked.output], predictions[tracked.output]
            if tracked.is_weighted:
                tracked.metric.update_state(*arrays, sample_weight=weights[tracked.output])
            else:
                tracked.metric.update_state(*arrays)

    def values(self, statistics: Mapping[str, Any]) -> dict[str, float]:
        """Turn pooled statistics into the numbers Keras would show, and leave the state in the metric objects.

        Args:
            statistics: Host statistics by log key.

        Returns:
            Floats by log key; a metric whose result is a dict gives each entry its own key.
        """
        results: dict[str, Any] = statistics[FED_ROWS].results() if FED_ROWS in statistics else {}
        for tracked in self._added:
            if tracked.key in statistics:
                results[tracked.key] = self._result(tracked, statistics[tracked.key])
        found: dict[str, float] = {}
        for key, value in results.items():
            parts = value if isinstance(value, Mapping) else {key: value}
            found.update({name: _number(part) for name, part in parts.items()})
        return found

    def _result(self, tracked: _Tracked, sums: Ratio | MetricSum) -> Any:
        if isinstance(sums, Ratio):
            return read_mean(tracked.metric, sums)
        zeros = self._zero[tracked.key]
        state = [np.asarray(zero + value).astype(zero.dtype) for zero, value in zip(zeros, sums.values, strict=True)]
        assign_all(tracked.metric.variables, state)
        if tracked.key not in self._results:
            self._results[tracked.key] = jax.jit(tracked.metric.stateless_result)
        return jax.device_get(self._results[tracked.key](state))


def _tracked(metrics: Any, weighted_metrics: Any, outputs: Sequence[Output]) -> list[_Tracked]:
    names = UniqueNames()
    found: list[_Tracked] = []
    for given, is_weighted in ((metrics, False), (weighted_metrics, True)):
        argument = "weighted_metrics" if is_weighted else "metrics"
        for index, items in enumerate(_per_output_lists(given, outputs, argument)):
            for item in items:
                metric, name = _bound(item, outputs[index])
                prefix = f"{outputs[index].name}_" if len(outputs) > 1 and outputs[index].name else ""
                again = f"{prefix}weighted_{name}" if is_weighted else None
                found.append(_Tracked(names.take(prefix + name, again=again), metric, index, is_weighted))
    return found


def _build_state(metric: Any, output: Output) -> None:
    """Create the variables of a metric that makes them from the first batch it sees, such as F1Score."""
    if metric.variables and getattr(metric, "_built", True):
        return
    metric.update_state(np.zeros(output.target or output.prediction, "float32"), np.zeros(output.prediction, "float32"))
    metric.reset_state()


def read_mean(metric: Any, ratio: Ratio) -> float:
    """Divide a ratio in double precision, and leave it in the metric object that shows it.

    Args:
        metric: A metric whose variables are a total and a count.
        ratio: On the host.
    """
    assign_all(metric.variables, (ratio.total, ratio.mass))
    return ratio.value()


def _is_mean(metric: Any) -> bool:
    """Say whether a metric's result is its first variable over its second."""
    return type(metric).result is keras.metrics.Mean.result and len(metric.variables) == 2


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array


def _per_output_lists(given: Any, outputs: Sequence[Output], argument: str) -> list[list[Any]]:
    if not given:
        return [[] for _ in outputs]
    if len(outputs) == 1:
        items = list(given.values()) if isinstance(given, Mapping) else list(given)
        return [[leaf for item in items for leaf in (item if isinstance(item, list | tuple) else [item])]]
    found = per_output(given, outputs, argument)
    return [[] if item is None else list(item) if isinstance(item, list | tuple) else [item] for item in found]


def _bound(item: Any, output: Output) -> tuple[Any, str]:
    if item is None:
        raise ValueError("Expected metric, received `None`")
    metric = _named_metric(item, target_kind(output)) if isinstance(item, str) else keras.metrics.get(item)
    name = item if isinstance(item, str) else display_name(metric)
    if isinstance(metric, type):
        metric = metric()
    if isinstance(item, str) and isinstance(metric, keras.metrics.Metric):
        metric.name = item  # callbacks look a monitored metric up by the word that compile was given
    if not isinstance(metric, keras.metrics.Metric):
        metric = keras.metrics.MeanMetricWrapper(metric, name=name)
    metric.name = name
    return metric, name

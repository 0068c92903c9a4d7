"""How one metric's number comes out of many batches: as sums where its state adds up, else by feeding it the rows.

Entry points: `is_additive`, `MetricSum`, `MetricRows`. Both kinds of statistics are pooled with `+`. Rows are fed on
the host to the metric object itself, batch by batch in Keras' order and without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from flax import struct

from dew_keras.outputs import Output
from dew_keras.token_metrics import Perplexity

# The name under which statistics hold the rows; no metric can be called this, as log keys are not empty.
FED_ROWS = ""
# Classes whose state after two batches is the sum of the states after each. The tests compare every public
# class with sequential updates. Mean and Sum as such are missing: in `compile` they take y_pred for a weight.
ADDITIVE = (
    keras.metrics.MeanMetricWrapper,
    keras.metrics.RootMeanSquaredError,
    keras.metrics.AUC,
    keras.metrics.Precision,
    keras.metrics.Recall,
    keras.metrics.TruePositives,
    keras.metrics.TrueNegatives,
    keras.metrics.FalsePositives,
    keras.metrics.FalseNegatives,
    keras.metrics.SensitivityAtSpecificity,
    keras.metrics.SpecificityAtSensitivity,
    keras.metrics.PrecisionAtRecall,
    keras.metrics.RecallAtPrecision,
    keras.metrics.FBetaScore,
    Perplexity,
)
# Keras' functions that compare the rows of a batch with each other, or reduce over them.
BATCH_FUNCTIONS = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)
DECIDING_METHODS = ("update_state", "result", "reset_state", "variables")


def is_additive(metric: Any, output: Output) -> bool:
    """Say whether a metric may be pooled as sums of what batches add to its state.

    That needs a class of Keras that is known to add up, or a subclass that changes none of its arithmetic, and a row
    of filling must do nothing when it weighs nothing.

    Args:
        metric: A Keras metric.
        output: What it measures.
    """
    known = next((kind for kind in type(metric).__mro__ if kind in _known_classes()), None)
    if known is None or known not in (*ADDITIVE, *_subclasses_of_keras(ADDITIVE)):
        return False
    if any(getattr(type(metric), name) is not getattr(known, name) for name in DECIDING_METHODS):
        return False
    function = getattr(metric, "_fn", None)
    if getattr(metric, "_fn_kwargs", {}).get("ignore_class") is not None:
        return False  # Keras reads what is ignored only beside weights, and padding is a weight
    return function is None or scores_rows_alone(function, output)


def _known_classes() -> set[type]:
    return {Perplexity, *(kind for kind in vars(keras.metrics).values() if isinstance(kind, type))}


def _subclasses_of_keras(kinds: Sequence[type]) -> list[type]:
    return [kind for kind in _known_classes() if issubclass(kind, tuple(kinds))]


def scores_rows_alone(function: Callable[..., Any], output: Output) -> bool:
    """Say whether a function of (y_true, y_pred) gives each row a number that other rows do not enter.

    Keras' own functions do. Others are tried on a few rows with and without copies of the first row, which is what
    filling is.

    Args:
        function: The function.
        output: What it compares.
    """
    if is_function_of_keras(function):
        return True
    rows = 4
    row = np.asarray(output.row)
    # Zeros and ones are classes, probabilities and numbers alike.
    y = np.broadcast_to((np.arange(rows) % 2).reshape(-1, *[1] * (row.ndim - 1)), (rows, *row.shape[1:]))
    y = y.astype(row.dtype)
    y_pred = np.random.default_rng(0).uniform(0.1, 0.9, (rows, *output.prediction[1:])).astype(np.float32)
    padded = np.r_[0:rows, 0, 0]
    alone, among = function(y, jnp.asarray(y_pred)), function(y[padded], jnp.asarray(y_pred[padded]))
    if jnp.ndim(alone) == 0 or len(alone) != rows or jnp.ndim(among) == 0 or len(among) != len(padded):
        return False
    return np.allclose(alone, among[:rows], rtol=1e-4, atol=1e-5, equal_nan=True)


def is_function_of_keras(function: Callable[..., Any]) -> bool:
    """Say whether a function is one of Keras' own that compare row by row.

    Args:
        function: A function of (y_true, y_pred), or a Keras loss, which reduces over rows.
    """
    is_keras = str(getattr(function, "__module__", "")).startswith("keras.")
    return is_keras and not isinstance(function, keras.losses.Loss) and function not in BATCH_FUNCTIONS


def assign_all(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign host values to Keras variables.

    Args:
        variables: The variables.
        values: One each, of the variable's shape.
    """
    # One call of a compiled identity for all: putting each on a device by itself takes five times as long, and the bar
    # on the screen does it at every redraw.
    placed = _on_device([np.asarray(value, variable.dtype) for variable, value in zip(variables, values, strict=True)])
    for variable, value in zip(variables, placed, strict=True):
        variable.assign(value)


_on_device = jax.jit(lambda values: values)


@struct.dataclass
class MetricSum:
    """What batches add to one metric's state.

    Attributes:
        values: One array per variable of the metric.
    """

    values: tuple[Any, ...]

    def __add__(self, other: MetricSum) -> MetricSum:
        """Pool two sums."""
        return MetricSum(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))


@struct.dataclass
class MetricRows:
    """One batch that metrics are still to be fed, by output.

    Attributes:
        targets: Targets of each output that a metric reads.
        predictions: Predictions of the same outputs.
        weights: Sample weights of the same outputs where a metric reads them.
        rows: float [B], 0 where a row is padding; None when no row is.
        feed: The metrics.
    """

    targets: dict[int, Any]
    predictions: dict[int, Any]
    weights: dict[int, Any]
    rows: Any
    feed: MetricFeed = struct.field(pytree_node=False)

    def __add__(self, other: MetricRows) -> FedPass:
        """Begin a pass with this batch and go on with another."""
        return FedPass(self.feed) + self + other

    def results(self) -> dict[str, Any]:
        """Compute the metrics of this batch alone, by log key."""
        return (FedPass(self.feed) + self).results()


class FedPass:
    """A pass over data that metric objects have been fed so far.

    Args:
        feed: The metrics.
        saved: What the metrics' variables held when the pass was saved; None for a pass from its start.
    """

    def __init__(self, feed: MetricFeed, saved: list[Any] | None = None) -> None:
        self._feed = feed
        self.saved = saved

    def state(self) -> list[np.ndarray]:
        """Return what the metrics' variables hold, in order."""
        self._feed.enter(self)
        return self._feed.state()

    def __add__(self, batch: MetricRows) -> FedPass:
        """Feed a host batch; the pass goes on in place, as the metric objects hold its state."""
        self._feed.enter(self)
        self._feed.update(batch)
        return self

    def results(self) -> dict[str, Any]:
        """Compute the metrics of the pass so far, by log key."""
        self._feed.enter(self)
        return self._feed.results()


class MetricFeed:
    """Metric objects that are updated with rows, as Keras updates them without compiling.

    Args:
        metrics: For each log key the metric, the number of its output, and whether it takes sample weights.
    """

    def __init__(self, metrics: dict[str, tuple[Any, int, bool]]) -> None:
        self._metrics = metrics
        self._inside: FedPass | None = None

    def rows(self, targets: Sequence[Any], predictions: Sequence[Any], weights: Sequence[Any], rows: Any) -> MetricRows:
        """Pick what the metrics read from a batch; traced.

        Args:
            targets: One array per output, rows first.
            predictions: One array per output, rows first.
            weights: Sample weights per output, or None.
            rows: float [B], 0 where a row is padding; None when no row is.
        """
        outputs = sorted({output for _, output, _ in self._metrics.values()})
        weighted = sorted({output for _, output, is_weighted in self._metrics.values() if is_weighted})
        return MetricRows(
            {output: targets[output] for output in outputs},
            {output: predictions[output] for output in outputs},
            {output: weights[output] for output in weighted if weights[output] is not None},
            rows,
            self,
        )

    def state(self) -> list[np.ndarray]:
        """Copy the variables of every metric to the host."""
        return [np.asarray(variable) for metric, _, _ in self._metrics.values() for variable in metric.variables]

    def enter(self, current: FedPass) -> None:
        """Make a pass the one whose state the objects hold: a callback may evaluate in the middle of an epoch.

        Args:
            current: The pass.
        """
        if self._inside is current:
            return
        variables = [variable for metric, _, _ in self._metrics.values() for variable in metric.variables]
        if self._inside is not None:
            self._inside.saved = self.state()
        self._inside = current
        if current.saved is None:
            for metric, _, _ in self._metrics.values():
                metric.reset_state()
            return
        assign_all(variables, current.saved)

    def update(self, batch: MetricRows) -> None:
        """Update every metric with the rows of a host batch that are no padding.

        Args:
            batch: Host arrays.
        """
        if batch.rows is not None:
            keep = np.asarray(batch.rows) > 0
            batch = jax.tree.map(lambda leaf: np.asarray(leaf)[keep], batch)
        for metric, output, is_weighted in self._metrics.values():
            y, y_pred = batch.targets[output], jnp.asarray(batch.predictions[output])
            weight = batch.weights.get(output) if is_weighted else None
            if weight is None:
                metric.update_state(y, y_pred)
            else:
                metric.update_state(y, y_pred, sample_weight=weight)

    def results(self) -> dict[str, Any]:
        """Read every metric, by log key."""
        return {key: jax.device_get(metric.result()) for key, (metric, _, _) in self._metrics.items()}

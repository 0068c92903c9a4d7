"""Keras losses as (total, mass), and the objective that trains any Flax module on them.

Entry points: `check_loss_names` at compile, `LossSet` when outputs are known, `KerasObjective`. Padded rows carry
zero weight and do not enter a divisor, so a ragged batch has the loss that Keras gives without padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

# There is no public way to read what a loss leaves out, as ignore_class does.
from keras.src.backend import get_keras_mask

from dew.objectives.base import LossOutput, Ratio
from dew.training.placing import plain
from dew_keras.calling import ModuleCall, cast_floats
from dew_keras.metrics import CROSS_ENTROPY, MetricSet, read_mean
from dew_keras.names import UniqueNames, display_name, unknown_name
from dew_keras.outputs import (
    Output,
    Path,
    align_targets,
    broadcast_rows,
    flatten_outputs,
    output_names,
    per_output,
    target_kind,
)
from dew_keras.pooling import is_function_of_keras, scores_rows_alone

MEAN_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class FunctionLoss(keras.losses.Loss):
    """A loss function of (y_true, y_pred) with Keras' default reduction, as `compile` wraps it."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(name=name, reduction="sum_over_batch_size")
        self.fn = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Compute the losses per row.

        Args:
            y_true: Targets.
            y_pred: Predictions.
        """
        y_true, y_pred = same_rank(y_true, y_pred)
        return self.fn(y_true, y_pred)


def loss_names() -> list[str]:
    """List the words that `loss=` understands."""
    public = [name for name in dir(keras.losses) if not name.startswith("_")]
    functions = [name for name in public if name not in ("get", "serialize", "deserialize", "Loss")]
    return [*functions, "mse", "mae", "mape", "msle", "kld", "bce", *CROSS_ENTROPY]


def check_loss_names(loss: Any) -> None:
    """Refuse unknown loss names and reductions before anything is built.

    Args:
        loss: What `compile` was given.

    Raises:
        ValueError: If a name means nothing, or a loss is not reduced to one number.
    """
    for item in jax.tree.leaves(loss, is_leaf=lambda node: not isinstance(node, list | tuple | dict)):
        if item is None:
            continue
        if isinstance(item, str):
            _named_loss(item, "sparse")
        elif not callable(item):
            raise ValueError(f"Could not interpret loss identifier. Received: loss={item!r}")
        elif isinstance(item, keras.losses.Loss) and item.reduction in (None, "none"):
            raise ValueError(
                f"A loss to train on must reduce to one number: use reduction='sum_over_batch_size', "
                f"'mean_with_sample_weight' or 'sum'. Received: loss={item.name}, reduction={item.reduction!r}"
            )


def _named_loss(name: str, kind: str) -> Any:
    wanted = name
    if name.lower() in CROSS_ENTROPY:
        wanted = ("sparse_categorical" if kind == "sparse" else kind) + "_crossentropy"
    try:
        return keras.losses.get(wanted)
    except ValueError as error:
        raise unknown_name("loss", name, loss_names()) from error


@dataclasses.dataclass(frozen=True)
class _Term:
    loss: keras.losses.Loss
    weight: float | None
    output: Output
    index: int
    key: str

    def refuse_padding(self) -> None:
        """Say no to padding where it would change the loss of the rows that are none; traced."""
        with jax.ensure_compile_time_eval():
            fits = scores_rows_alone(_function(self.loss), self.output)
        if not fits:
            raise ValueError(
                f"The loss {self.loss.name!r} does not give each row a number of its own, so rows that only fill a "
                "batch up cannot be left out of it. Return one number per row, or use a batch_size that divides the "
                "rows and is a multiple of the mesh's row shards."
            )


class LossSet:
    """The losses of a compiled model, bound to its outputs.

    Args:
        loss: As `compile` takes it: one for all outputs, or one per output by position or name.
        loss_weights: Factors of the losses, in the same form, or None.
        outputs: Shapes of predictions and targets per output.

    Raises:
        ValueError: If the losses do not fit the outputs, or none is given.
    """

    def __init__(self, loss: Any, loss_weights: Any, outputs: Sequence[Output]) -> None:
        losses = per_output(loss, outputs, "loss")
        weights = per_output(loss_weights, outputs, "loss_weights")
        names = UniqueNames()
        self._terms: list[_Term] = []
        for index, (item, weight) in enumerate(zip(losses, weights, strict=True)):
            if item is None:
                continue
            bound, name = _bound(item, outputs[index])
            if outputs[index].target is None:
                raise missing_targets(name)
            key = names.take(f"{outputs[index].name or name}_loss")
            self._terms.append(_Term(bound, None if weight is None else float(weight), outputs[index], index, key))
        if not self._terms:
            raise ValueError("None of the model's outputs has a loss. Give compile(loss=...) one.")

    @property
    def keys(self) -> list[str]:
        """Log keys of the losses of outputs; none where the only one is the loss itself."""
        return [term.key for term in self._terms] if len(self._terms) > 1 else []

    def values(
        self, targets: Sequence[Any], predictions: Sequence[Any], weights: Sequence[Any], rows: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Compute the loss of one batch; traced.

        Args:
            targets: One array per output, rows first.
            predictions: One array per output, rows first.
            weights: Sample weights per output, or None.
            rows: float [B], 0 where a row is padding; None when no row is.

        Returns:
            The weighted sum of the losses, and each loss by log key when there are several.
        """
        total, parts = jnp.zeros((), jnp.float32), {}
        for term in self._terms:
            index = term.index
            if targets[index] is None:
                raise missing_targets(term.loss.name)
            if rows is not None:
                term.refuse_padding()
            try:
                value = batch_loss(term.loss, targets[index], predictions[index], weights[index], rows)
            except (TypeError, ValueError) as error:
                y, y_pred = jnp.shape(targets[index]), jnp.shape(predictions[index])
                error.add_note(f"The loss {term.loss.name!r} compared targets of shape {y} with outputs {y_pred}.")
                raise
            parts[term.key] = value
            total = total + (value if term.weight is None else value * term.weight)
        return total, {key: parts[key] for key in self.keys}


def _bound(item: Any, output: Output) -> tuple[keras.losses.Loss, str]:
    loss = _named_loss(item, target_kind(output)) if isinstance(item, str) else item
    if isinstance(loss, type):
        loss = loss()
    name = item if isinstance(item, str) else display_name(loss)
    return (loss, name) if isinstance(loss, keras.losses.Loss) else (FunctionLoss(loss, name), name)


def missing_targets(name: str) -> ValueError:
    """Build the error for a loss that has nothing to compare with.

    Args:
        name: Of the loss.
    """
    return ValueError(
        f"The loss {name!r} needs targets, and y is missing. Pass fit(x, y); a tuple alone is a tuple of inputs."
    )


def _function(loss: keras.losses.Loss) -> Callable[..., Any]:
    """Return what compares targets and predictions: the function that Keras wraps, where it is one of its own."""
    wraps = type(loss).call in (keras.losses.MeanSquaredError.call, FunctionLoss.call)
    if wraps and is_function_of_keras(loss.fn):
        return loss.fn
    return lambda y, y_pred: loss.call(jnp.asarray(y, loss.dtype), jnp.asarray(y_pred, loss.dtype))


def batch_loss(loss: keras.losses.Loss, y: Any, y_pred: Any, weight: Any, rows: Any) -> Any:
    """Reduce a Keras loss over the rows that are no padding; traced.

    Args:
        loss: The loss object.
        y: Targets, rows first.
        y_pred: Predictions, rows first.
        weight: Sample weights, or None.
        rows: float [B], 0 where a row is padding; None when no row is.

    Returns:
        The scalar that Keras computes for the batch without its padding.
    """
    if rows is None:
        return loss(y, y_pred, sample_weight=weight)
    losses = loss.call(jnp.asarray(y, loss.dtype), jnp.asarray(y_pred, loss.dtype))
    rows = jnp.asarray(rows, losses.dtype)
    divisor = jnp.sum(rows) * (losses.size / losses.shape[0])
    weight = _masked_weight(loss, weight, get_keras_mask(losses), rows)
    if weight is not None:
        losses, weight = same_rank(losses, weight)
        if loss.reduction == "mean_with_sample_weight":
            divisor = jnp.sum(weight * broadcast_rows(rows, weight))
        losses = losses * weight
    total = jnp.sum(jnp.where(broadcast_rows(rows, losses) > 0, losses, 0.0))
    if loss.reduction not in MEAN_REDUCTIONS:
        return total
    return _quotient(total, divisor)


def _masked_weight(loss: keras.losses.Loss, weight: Any, mask: Any, rows: Any) -> Any:
    """Enter into the weights what the loss itself leaves out, as `ignore_class` does, over rows that are no padding."""
    if weight is not None:
        weight = jnp.asarray(weight, rows.dtype)
    if mask is None:
        return weight
    mask = jnp.asarray(mask, rows.dtype) * broadcast_rows(rows, mask)
    if loss.reduction in MEAN_REDUCTIONS[:2]:
        # Keras then averages over what is left in, where it averages over everything under sample weights.
        mask = mask * _quotient(jnp.sum(rows) * (mask.size / mask.shape[0]), jnp.sum(mask))
    if weight is None:
        return mask
    mask, weight = same_rank(mask, weight)
    return mask * weight


def _quotient(total: Any, divisor: Any) -> Any:
    return jnp.where(divisor != 0, total / jnp.where(divisor != 0, divisor, 1.0), 0.0)


def same_rank(first: Any, second: Any) -> tuple[Any, Any]:
    """Squeeze or expand the last dimension where two ranks differ by one, as Keras does before comparing.

    Args:
        first: An array.
        second: An array.
    """
    swapped = second.ndim > first.ndim
    long, short = (second, first) if swapped else (first, second)
    if long.ndim == short.ndim + 1 and long.shape[-1] == 1:
        if short.ndim == 1:
            short = short[..., None]
        else:
            long = long[..., 0]
    return (short, long) if swapped else (long, short)


@dataclasses.dataclass(frozen=True, eq=False)
class KerasObjective:
    """A Flax module under Keras losses and metrics.

    Batches hold `x`, and `y`, `sample_weight`, `rows` (1 for a row, 0 for padding) where there are any.

    Attributes:
        call: How the module is called.
        init: Makes fresh variables from a random key.
        losses: The losses, or None for an objective that only measures.
        metrics: The metrics.
        loss_tracker: Shows a user the mean loss of the last pass.
        paths: Where the outputs are in what the module returns.
        compute_loss: The user's own loss of a batch, as `keras.Model.compute_loss`; None for `losses`.
    """

    call: ModuleCall
    init: Callable[[jax.Array], Any]
    losses: LossSet | None
    metrics: MetricSet
    loss_tracker: keras.metrics.Mean
    paths: tuple[Path, ...]
    compute_loss: Callable[..., Any] | None = None

    @property
    def module(self) -> Any:
        """The Flax module under training."""
        return self.call.module

    @property
    def keys(self) -> list[str]:
        """Log keys in the order of `evaluate`: the loss, the losses of outputs, metrics."""
        return ["loss", *(self.losses.keys if self.losses else ()), *self.metrics.names]

    def check(self, example: Mapping[str, Any]) -> None:
        """Refuse targets or sample weights that are not in the structure of the outputs.

        Args:
            example: A host batch.
        """
        for name in ("y", "sample_weight"):
            align_targets(example.get(name), self.paths, name)

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Leave the batch as it is.

        Args:
            batch: Host arrays, rows first.
        """
        return dict(batch)

    def loss(self, variables: Any, batch: Mapping[str, Any], *, key: jax.Array, train: bool) -> LossOutput:
        """Score one batch.

        Args:
            variables: The module's collections.
            batch: What `prepare` returned.
            key: Random key for dropout.
            train: Whether this is a training step.

        Returns:
            The loss times the rows over the rows: Keras weighs batches by their rows within an epoch.
        """
        y_pred, changed, added = self.call.apply(variables, batch["x"], key=key, train=train)
        # Losses and metrics are computed in float32, whatever the module computes in.
        _, predictions = flatten_outputs(cast_floats(y_pred, jnp.float32))
        targets = align_targets(batch.get("y"), self.paths, "y")
        weights = align_targets(batch.get("sample_weight"), self.paths, "sample_weight")
        rows = batch.get("rows")
        size = jax.tree.leaves(batch["x"])[0].shape[0]
        count = jnp.asarray(size, jnp.float32) if rows is None else jnp.sum(rows)
        value: Any = jnp.zeros((), jnp.float32)
        parts: dict[str, Any] = {}
        if self.compute_loss is not None:
            y, weight = batch.get("y"), batch.get("sample_weight")
            value = self.compute_loss(x=batch["x"], y=y, y_pred=y_pred, sample_weight=weight, training=train)
        elif self.losses is not None:
            value, parts = self.losses.values(targets, predictions, weights, rows)
        metrics: dict[str, Any] = {name: Ratio(part * count, count) for name, part in parts.items()}
        metrics.update(self.metrics.statistics(targets, predictions, weights, rows))
        return LossOutput(Ratio((value + added) * count, count), metrics, changed)

    def report(self, statistics: Mapping[str, Any]) -> dict[str, float]:
        """Turn pooled statistics into the numbers that logs show, and leave them in the metric objects.

        Args:
            statistics: Host statistics by name.

        Returns:
            Floats by log key, sorted by name.
        """
        values = {name: item.value() for name, item in statistics.items() if isinstance(item, Ratio)}
        values["loss"] = read_mean(self.loss_tracker, statistics["loss"])
        values.update(self.metrics.values(statistics))
        return dict(sorted(values.items()))


def bind_objective(
    call: ModuleCall,
    example: Mapping[str, Any],
    *,
    init: Callable[[jax.Array], Any],
    variables: Any,
    outputs: Any = None,
    loss: Any,
    loss_weights: Any,
    metrics: Any,
    weighted_metrics: Any,
    loss_tracker: keras.metrics.Mean,
    compute_loss: Callable[..., Any] | None = None,
) -> KerasObjective:
    """Bind losses and metrics to a module once a batch shows the shapes.

    Args:
        call: How the module is called.
        example: A host batch as `fit` makes it.
        init: Makes fresh variables from a random key.
        variables: Shapes of the module's variables.
        outputs: Shapes of the module's outputs for one row; None traces the module for them.
        loss: As `compile` takes it, or None.
        loss_weights: As `compile` takes it.
        metrics: As `compile` takes it.
        weighted_metrics: As `compile` takes it.
        loss_tracker: Where to show the mean loss.
        compute_loss: The user's own loss of a batch, or None.

    Returns:
        The objective.

    Raises:
        ValueError: If the module refuses the input, or losses and metrics do not fit its outputs.
    """
    example = jax.tree.map(lambda leaf: np.asarray(leaf)[:1], dict(example))
    if outputs is None:
        outputs = call.output_shapes(plain(variables), example["x"])
    paths, predictions = flatten_outputs(outputs)
    targets = align_targets(example.get("y"), paths, "y")
    bound = [
        Output(path, name, tuple(prediction.shape), target)
        for path, name, prediction, target in zip(paths, output_names(paths), predictions, targets, strict=True)
    ]
    if example.get("y") is None:
        metrics = weighted_metrics = None
    has_own_loss = compute_loss is not None and example.get("y") is None
    losses = None if loss is None or has_own_loss else LossSet(loss, loss_weights, bound)
    return KerasObjective(
        call=call,
        init=init,
        losses=losses,
        metrics=MetricSet(metrics, weighted_metrics, bound),
        loss_tracker=loss_tracker,
        paths=tuple(paths),
        compute_loss=compute_loss,
    )

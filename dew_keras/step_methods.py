"""Keras' overridable pieces of a step, which `Model` inherits: `StepMethods`.

The pieces are pure, as on Keras' JAX backend: a step maps (state, data) to (logs, state). State entries are trees of
arrays where Keras has lists. What a subclass overrides is run by `custom_steps.py`; nothing here runs otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import keras
from flax.errors import InvalidRngError

from dew.kernels.dropout import MissingKeyError
from dew_keras.outputs import align_targets, flatten_outputs


class StepMethods:
    """One step of training, evaluation and prediction, in pieces that a subclass may replace."""

    _engine: Any
    _step_keys: Iterator[Any] | None = None
    _loss_tracker: Any

    @property
    def metrics(self) -> list[Any]:
        """The Keras metric objects: the loss, those of `compile` once a batch showed the outputs, and attributes."""
        known = getattr(self._engine.bound_objective, "metrics", None)
        compiled = [] if known is None else known.metrics
        own = [value for value in vars(self).values() if isinstance(value, keras.metrics.Metric)]
        return [self._loss_tracker, *compiled, *(metric for metric in own if metric is not self._loss_tracker)]

    def reset_metrics(self) -> None:
        """Set every metric object back; a pass starts its own sums in any case."""
        for metric in self.metrics:
            metric.reset_state()

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the metrics' numbers by name."""
        known = getattr(self._engine.bound_objective, "metrics", None)
        keys = {} if known is None else {id(m): key for m, key in zip(known.metrics, known.names, strict=True)}
        found: dict[str, Any] = {}
        for metric in self.metrics:
            result = metric.result()
            found.update(result if isinstance(result, Mapping) else {keys.get(id(metric), metric.name): result})
        return found

    def stateless_call(
        self,
        trainable_variables: Any,
        non_trainable_variables: Any,
        x: Any,
        training: bool = False,
        return_losses: bool = False,
        *,
        key: Any = None,
    ) -> Any:
        """Call the module without changing the model.

        Args:
            trainable_variables: The parameters.
            non_trainable_variables: The other collections by name.
            x: Inputs, rows first.
            training: Whether this is a training step; further such calls in a step draw other random numbers.
            return_losses: Whether to return what the module sowed into "losses" too.
            key: Random key of the call. None takes the next one of the step; outside of a `train_step` there is
                none, and a module that draws needs one here: the collections hold no seeds that would go on.

        Returns:
            The outputs and the new other collections; with `return_losses` also a list of loss terms.

        Raises:
            ValueError: If the module draws random numbers and there is no key.
        """
        variables = {**non_trainable_variables, "params": trainable_variables}
        if key is None and training and self._step_keys is not None:
            key = next(self._step_keys)
        with _naming_key(self._engine.module):
            y_pred, changed, added = self._engine.training_call.apply(variables, x, key=key, train=training)
        non_trainable = {**non_trainable_variables, **changed}
        return (y_pred, non_trainable, [added]) if return_losses else (y_pred, non_trainable)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Compute the compiled loss of one batch; traced.

        Args:
            x: Inputs.
            y: Targets.
            y_pred: Outputs of the module.
            sample_weight: Weights, or None.
            training: Whether this is a training step.

        Returns:
            A scalar. Loss terms that the module sowed are added by the step.
        """
        objective = self._engine.bound_objective
        paths, predictions = flatten_outputs(y_pred)
        targets = align_targets(y, paths, "y")
        weights = align_targets(sample_weight, paths, "sample_weight")
        return objective.losses.values(targets, predictions, weights, None)[0]

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Update the compiled metrics with one batch; traced.

        Args:
            x: Inputs.
            y: Targets.
            y_pred: Outputs of the module.
            sample_weight: Weights, or None.

        Returns:
            The numbers by name, over the pass so far.
        """
        paths, predictions = flatten_outputs(y_pred)
        targets = align_targets(y, paths, "y")
        weights = align_targets(sample_weight, paths, "sample_weight")
        self._engine.bound_objective.metrics.update(targets, predictions, weights)
        return self.get_metrics_result()

    def train_step(self, state: Any, data: Any) -> tuple[dict[str, Any], Any]:
        """Train on one batch; pure.

        Args:
            state: (trainable variables, non-trainable variables, optimizer variables, metric variables).
            data: (x,), (x, y) or (x, y, sample_weight).

        Returns:
            The logs, and the new state.
        """
        trainable, non_trainable, optimizer_variables, metric_variables = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        optimizer: Any = self._engine.optimizer

        def scaled(trainable: Any) -> tuple[Any, Any]:
            loss, updates = self._loss_and_updates(trainable, non_trainable, x, y, sample_weight, training=True)
            return optimizer.scale_loss(loss), (loss, *updates)

        gradients, (loss, y_pred, non_trainable) = jax.grad(scaled, has_aux=True)(trainable)
        trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, gradients, trainable)
        logs, metric_variables = self._measured(metric_variables, loss, x, y, y_pred, sample_weight)
        return logs, (trainable, non_trainable, optimizer_variables, metric_variables)

    def test_step(self, state: Any, data: Any) -> tuple[dict[str, Any], Any]:
        """Score one batch; pure.

        Args:
            state: (trainable variables, non-trainable variables, metric variables).
            data: As in `train_step`.

        Returns:
            The logs, and the new state.
        """
        trainable, non_trainable, metric_variables = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, (y_pred, _) = self._loss_and_updates(trainable, non_trainable, x, y, sample_weight, training=False)
        logs, metric_variables = self._measured(metric_variables, loss, x, y, y_pred, sample_weight)
        return logs, (trainable, non_trainable, metric_variables)

    def predict_step(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Compute the outputs of one batch; pure.

        Args:
            state: (trainable variables, non-trainable variables).
            data: (x,).

        Returns:
            The outputs, and the non-trainable variables.
        """
        trainable, non_trainable = state
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.stateless_call(trainable, non_trainable, x, training=False)

    def _loss_and_updates(
        self, trainable: Any, non_trainable: Any, x: Any, y: Any, sample_weight: Any, *, training: bool
    ) -> tuple[Any, Any]:
        y_pred, non_trainable, losses = self.stateless_call(
            trainable, non_trainable, x, training=training, return_losses=True
        )
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return loss + sum(losses), (y_pred, non_trainable)

    def _measured(
        self, metric_variables: Any, loss: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> tuple[dict[str, Any], list[Any]]:
        with metric_state(self.metrics, metric_variables) as read:
            self._loss_tracker.update_state(loss, sample_weight=jax.tree.leaves(x)[0].shape[0])
            logs = self.compute_metrics(x, y, y_pred, sample_weight)
            # A compute_metrics that returns its own numbers alone still reports the loss.
            return {"loss": self._loss_tracker.result(), **logs}, read()


@contextlib.contextmanager
def _naming_key(module: Any) -> Iterator[None]:
    """Say how a module that draws random numbers gets the key that it lacks."""
    try:
        yield
    except (MissingKeyError, InvalidRngError) as error:
        raise ValueError(
            f"{type(module).__name__} draws random numbers in this call, and only a train_step that fit() runs has a "
            "key for them. Give one, another for each call: stateless_call(..., key=jax.random.key(0)). Received: "
            "key=None"
        ) from error


@contextlib.contextmanager
def metric_state(metrics: list[Any], values: list[Any]) -> Iterator[Any]:
    """Let metric objects work on given values instead of their own.

    Args:
        metrics: The metric objects.
        values: One array per variable of them, in order.

    Yields:
        A function that returns the values as they are by then.
    """
    references = [variable for metric in metrics for variable in metric.variables]
    pairs = list(zip(references, values, strict=True))
    with keras.StatelessScope(state_mapping=pairs) as scope:

        def read() -> list[Any]:
            current = [scope.get_current_value(reference) for reference in references]
            return [value if now is None else now for now, value in zip(current, values, strict=True)]

        yield read

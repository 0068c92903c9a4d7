"""Runs what a subclass of `Model` overrides: `train_step`, `test_step`, `predict_step`, `compute_metrics`.

Entry points: `overridden`, `CustomSteps`, `LatestLogs`. The engine's loop runs such a step in place of its own, and
hands the metrics' variables on from batch to batch, as Keras does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dew.training.optimizer import Optimizer, as_step_transformation
from dew.training.state import TrainState, accumulation_dtype
from dew_keras.step_methods import StepMethods

TRAINING_STEPS = ("train_step", "compute_metrics")
STEPS = (*TRAINING_STEPS, "test_step")
OVERRIDABLE = (*STEPS, "predict_step", "compute_loss")


def overridden(model: Any) -> frozenset[str]:
    """Name the pieces of a step that a model's class replaces.

    Args:
        model: A model.
    """
    changed = [name for name in OVERRIDABLE if getattr(type(model), name) is not getattr(StepMethods, name)]
    return frozenset(changed)


class LatestLogs:
    """Logs that a step computes over the pass itself: the last batch's numbers count."""

    def __init__(self) -> None:
        self._latest: Mapping[str, Any] = {}

    def start_with(self, sums: Mapping[str, Any]) -> None:
        """Begin with what the pass had when it was saved.

        Args:
            sums: What `sums` returned.
        """
        self._latest = {name: value["latest"] for name, value in sums.items()}

    def sums(self) -> dict[str, Any]:
        """Return the last batch's numbers for a file, waiting for the device."""
        return {name: {"latest": value} for name, value in jax.device_get(dict(self._latest)).items()}

    def add(self, statistics: Mapping[str, Any], *, steps: int = 1) -> None:
        """Take what a started step reports.

        Args:
            statistics: Numbers by name, on the device.
            steps: Steps that were run as one program; their numbers are stacked.
        """
        self._latest = statistics if steps == 1 else {name: value[-1] for name, value in statistics.items()}

    def newest(self) -> dict[str, float]:
        """Return the last batch's numbers."""
        return self.values()

    def values(self) -> dict[str, float]:
        """Return the last batch's numbers, sorted by name, waiting for the device."""
        return self.so_far()()

    def so_far(self) -> Callable[[], dict[str, float]]:
        """Return what reads this batch's numbers, whenever it is called."""
        latest = dict(self._latest)

        def values() -> dict[str, float]:
            host = jax.device_get(latest)
            return {name: float(value) if np.ndim(value) == 0 else value for name, value in sorted(host.items())}

        return values


class CustomSteps:
    """The steps of one model, in the forms that the engine runs.

    Args:
        model: The model whose class overrides steps.
        transformation: The compiled optimizer.
        is_eager: Whether steps are run operation by operation.
    """

    def __init__(self, model: Any, transformation: Optimizer, *, is_eager: bool) -> None:
        self._model = model
        self._transformation = as_step_transformation(transformation)
        self._is_eager = is_eager

    def fresh_metrics(self) -> list[jax.Array]:
        """Return the metrics' variables at the start of a pass."""
        for metric in self._model.metrics:
            metric.reset_state()
        return [jnp.array(v.value) for metric in self._model.metrics for v in metric.variables]

    def keep_metrics(self, values: Sequence[Any]) -> None:
        """Assign the metrics' variables at the end of a pass, so that `result()` reads it.

        Args:
            values: One array per variable.
        """
        references = [variable for metric in self._model.metrics for variable in metric.variables]
        for reference, value in zip(references, values, strict=True):
            reference.assign(np.asarray(value))

    def train(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, dict[str, Any], jax.Array]:
        """Run `train_step` on the engine's state; traced.

        Args:
            state: The training state, metric variables in its carry.
            batch: Holds `x`, and `y` and `sample_weight` where there are any.

        Returns:
            The next state, the logs, and that an update was applied.

        Raises:
            TypeError: If the step does not return logs and a state of four.
        """
        model, params = self._model, state.params
        rest = {name: tree for name, tree in state.variables.items() if name != "params"}
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        with self._tracing(key, state.opt_state):
            logs, new = _checked(
                model.train_step((params, rest, state.opt_state, list(state.carry)), _data(batch)), "train_step", 4
            )
        trainable, non_trainable, opt_state, metrics = new
        state = state.replace(
            step=state.step + 1,
            updates=state.updates + 1,
            variables={**non_trainable, "params": trainable},
            opt_state=opt_state,
            carry=list(metrics),
        )
        return state, logs, jnp.ones((), bool)

    def test(self, variables: Any, metrics: list[Any], batch: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Run `test_step`.

        Args:
            variables: All collections.
            metrics: The metrics' variables.
            batch: As in `train`, on the mesh.

        Returns:
            The logs and the new metric variables.
        """
        with jax.disable_jit(self._is_eager):
            return self._test(variables, metrics, batch)

    @functools.cached_property
    def _test(self) -> Any:
        def run(variables: Any, metrics: list[Any], batch: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
            rest = {name: tree for name, tree in variables.items() if name != "params"}
            with self._tracing(None):
                result = self._model.test_step((variables["params"], rest, list(metrics)), _data(batch))
            logs, (_, _, metrics) = _checked(result, "test_step", 3)
            return logs, list(metrics)

        return jax.jit(run)

    def predict(self, variables: Any, x: Any) -> Any:
        """Run `predict_step`; traced.

        Args:
            variables: All collections.
            x: Inputs, rows first.
        """
        rest = {name: tree for name, tree in variables.items() if name != "params"}
        with self._tracing(None):
            return self._model.predict_step((variables["params"], rest), (x,))[0]

    @contextlib.contextmanager
    def _tracing(self, key: jax.Array | None, opt_state: Any = None) -> Iterator[None]:
        """Give the model the step's random keys, and its optimizer the loss scale and the pure update of the mesh."""
        model, optimizer = self._model, self._model._engine.optimizer
        before, model._step_keys = model._step_keys, None if key is None else _keys(key)
        # Keras' own method needs variables that the object never makes here; a step written for Keras calls it.
        optimizer.stateless_apply = self._apply
        optimizer.scale_loss = functools.partial(self._scaled, opt_state)
        try:
            yield
        finally:
            model._step_keys = before
            del optimizer.stateless_apply, optimizer.scale_loss

    def _scaled(self, opt_state: Any, loss: Any) -> Any:
        read = self._transformation.loss_scale
        return loss if read is None else loss * read(opt_state)

    def _apply(self, optimizer_variables: Any, gradients: Any, trainable_variables: Any) -> tuple[Any, Any]:
        hooks = self._transformation

        def update(gradients: Any) -> tuple[Any, Any]:
            updates, new = hooks.update(gradients, optimizer_variables, trainable_variables)
            new = jax.tree.map(lambda leaf, old: jnp.asarray(leaf, old.dtype), new, optimizer_variables)
            return optax.apply_updates(trainable_variables, updates), new

        if hooks.loss_scale is None:
            return update(gradients)
        inverse = 1 / hooks.loss_scale(optimizer_variables)
        gradients = jax.tree.map(
            lambda g, p: (g.astype(accumulation_dtype(g.dtype)) * inverse).astype(p.dtype),
            gradients,
            trainable_variables,
        )
        if hooks.reject is None:
            return update(gradients)
        reject = hooks.reject
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradients)]))
        return jax.lax.cond(finite, update, lambda _: (trainable_variables, reject(optimizer_variables)), gradients)


def _data(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    found = (batch["x"], batch.get("y"), batch.get("sample_weight"))
    return found if found[2] is not None else found[:2] if found[1] is not None else found[:1]


def _checked(result: Any, name: str, size: int) -> tuple[dict[str, Any], Any]:
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Mapping)
    if not is_pair or not isinstance(result[1], tuple | list) or len(result[1]) != size:
        raise TypeError(
            f"{name}(state, data) must return (logs, state): a dict of numbers and the {size} entries it was given. "
            f"Received: {type(result).__name__}"
        )
    return dict(result[0]), result[1]


def _keys(key: jax.Array) -> Iterator[jax.Array]:
    """Give the step's key for its first call, and another for each further one."""
    yield key
    for number in itertools.count():
        # 1 is that of the collection "params". Made anew: a call may be traced inside a loop, the next outside of it.
        yield jax.random.fold_in(jax.random.fold_in(key, 2), number)

"""The pure functions of a training run: one batch in, the next state out.

Entry points: `batch_gradients`, `update_step`, `accumulate_step`, `commit_step`,
`evaluation_step`. A window's totals and masses are summed and divided once, before the optimizer, unless the optimizer
asks for the mean of its batches; see `StepTransformation` for this and for what else an optimizer adds to a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dew.nn.router import scaled_gradients
from dew.objectives.base import LossOutput, Objective, Ratio
from dew.training.optimizer import Optimizer, StepTransformation, as_step_transformation
from dew.training.state import Accumulator, TrainState, accumulation_dtype, empty_accumulator

Statistics = dict[str, Ratio]
StepFunction = Callable[[TrainState, Any], tuple[TrainState, Statistics, jax.Array]]


def batch_gradients(objective: Objective, shardings: Any = None) -> Callable[..., tuple[LossOutput, Any]]:
    """Build the function that scores one batch and differentiates the loss's total.

    Args:
        objective: What is trained.
        shardings: Where each parameter lives; gradients are pinned there. None leaves the
            choice to the compiler.

    Returns:
        A function of (variables, batch, key, scale=None) giving the loss output and the gradient of its
        total, a sum over the batch that no mass has divided yet. Given a scale, the mean loss is multiplied by
        it while it is differentiated, and the gradients, widened to float32, are divided by it.
    """

    def run(variables: Any, batch: Any, key: jax.Array, scale: Any = None) -> tuple[LossOutput, Any]:
        rest = {name: tree for name, tree in variables.items() if name != "params"}

        def total(params: Any) -> tuple[jax.Array, LossOutput]:
            output = objective.loss({**rest, "params": params}, batch, key=key, train=True)
            _check_output(output, rest)
            if scale is None:
                return output.loss.total, output
            # The mean: in a narrow dtype the range must not depend on how many rows a batch has.
            return output.loss.total * (scale / _divisor(output.loss)), output

        gradients, output = jax.grad(total, has_aux=True)(variables["params"])
        if scale is not None:
            gradients = _scaled(gradients, _divisor(output.loss) / scale)
        if shardings is not None:
            gradients = jax.lax.with_sharding_constraint(gradients, shardings)
        return output, gradients

    return run


def update_step(objective: Objective, optimizer: Optimizer, shardings: Any = None) -> StepFunction:
    """Build the step where every batch is an update.

    Args:
        objective: What is trained.
        optimizer: An optax transformation, or a `StepTransformation`.
        shardings: Where each parameter, and so its gradient, lives.

    Returns:
        A function of (state, batch) giving the next state, the batch's statistics and whether
        the update was applied. A batch without any mass or with a value that is not finite
        moves the counters only.
    """
    differentiate, hooks = batch_gradients(objective, shardings), as_step_transformation(optimizer)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Statistics, jax.Array]:
        output, gradients = differentiate(state.variables, batch, _step_key(state), _scale(hooks, state))
        state = _merge(state, output)
        state, applied = _apply(hooks, state, gradients, output.loss)
        return state, statistics(output), applied

    return step


def accumulate_step(objective: Objective, optimizer: Optimizer, shardings: Any = None) -> StepFunction:
    """Build the step that adds a batch to the open window.

    Args:
        objective: What is trained.
        optimizer: As for `commit_step`.
        shardings: Where each parameter, and so its gradient, lives.

    Returns:
        A function of (state, batch) as `update_step` gives; it never applies an update.
    """
    differentiate, hooks = batch_gradients(objective, shardings), as_step_transformation(optimizer)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Statistics, jax.Array]:
        state, output = _accumulated(differentiate, hooks, state, batch)
        if hooks.after_batch is not None:
            params, opt_state = hooks.after_batch(state.params, state.opt_state)
            state = state.replace(variables={**state.variables, "params": params}, opt_state=opt_state)
        return state.replace(microstep=state.microstep + 1), statistics(output), jnp.zeros((), bool)

    return step


def commit_step(objective: Objective, optimizer: Optimizer, shardings: Any = None) -> StepFunction:
    """Build the step that adds the last batch of a window and applies the update.

    Args:
        objective: What is trained.
        optimizer: An optax transformation, or a `StepTransformation`.
        shardings: Where each parameter, and so its gradient, lives.

    Returns:
        A function of (state, batch) as `update_step` gives; the window is empty afterwards.
    """
    differentiate, hooks = batch_gradients(objective, shardings), as_step_transformation(optimizer)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Statistics, jax.Array]:
        state, output = _accumulated(differentiate, hooks, state, batch)
        window = state.accumulator
        state, applied = _apply(hooks, state, window.gradients, window.loss)
        state = state.replace(microstep=jnp.zeros((), jnp.int32), accumulator=empty_accumulator(state.params))
        return state, statistics(output), applied

    return step


def evaluation_step(objective: Objective) -> Callable[[Any, Any, jax.Array], Statistics]:
    """Build the function that scores a batch without training.

    Args:
        objective: What is evaluated.

    Returns:
        A function of (variables, batch, key) giving the batch's statistics.
    """

    def step(variables: Any, batch: Any, key: jax.Array) -> Statistics:
        return statistics(objective.loss(variables, batch, key=key, train=False))

    return step


def statistics(output: LossOutput) -> Statistics:
    """Collect what a batch reports, numbers in float32 and arrays as they are.

    Args:
        output: What the objective said.

    Returns:
        "loss" first, then the metrics by name.
    """
    ratios = {"loss": output.loss, **output.metrics}
    return jax.tree.map(lambda value: value if jnp.ndim(value) else jnp.asarray(value, jnp.float32), ratios)


def _step_key(state: TrainState) -> jax.Array:
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)


def _scale(hooks: StepTransformation, state: TrainState) -> jax.Array | None:
    return None if hooks.loss_scale is None else hooks.loss_scale(state.opt_state)


def _divisor(loss: Ratio) -> jax.Array:
    """Return the mass, or 1 where a batch has none: such a batch is rejected later, not a division by zero here."""
    mass = jax.lax.stop_gradient(loss.mass)
    return jnp.where(mass > 0, mass, 1.0)


def _scaled(gradients: Any, factor: jax.Array) -> Any:
    return scaled_gradients(jax.tree.map(lambda g: g.astype(accumulation_dtype(g.dtype)), gradients), factor)


def _accumulated(
    differentiate: Any, hooks: StepTransformation, state: TrainState, batch: Any
) -> tuple[TrainState, LossOutput]:
    output, gradients = differentiate(state.variables, batch, _step_key(state), _scale(hooks, state))
    window, loss = state.accumulator, output.loss
    if hooks.averages_batches:
        share = jnp.where(loss.mass > 0, 1 / _divisor(loss), 0.0)
        gradients, loss = _scaled(gradients, share), Ratio(loss.total * share, loss.mass * share)
    summed = jax.tree.map(lambda a, g: a + g.astype(a.dtype), window.gradients, gradients)
    state = _merge(state, output)
    return state.replace(accumulator=Accumulator(summed, window.loss + loss)), output


def _merge(state: TrainState, output: LossOutput) -> TrainState:
    """Count the batch and take its collections over, unless its loss is not finite."""
    finite = jnp.isfinite(output.loss.total)
    old = {name: state.variables[name] for name in output.variables}
    fresh = jax.tree.map(lambda new, was: jnp.where(finite, new, was), output.variables, old)
    return state.replace(step=state.step + 1, variables={**state.variables, **fresh})


def _apply(hooks: StepTransformation, state: TrainState, gradients: Any, loss: Ratio) -> tuple[TrainState, jax.Array]:
    """Divide the window's sums and update, or keep everything where that has no meaning."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradients)]
    finite = jnp.all(jnp.stack([jnp.isfinite(loss.total), *leaves]))
    accept = finite & (loss.mass > 0)

    def update(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
        # One division in all: XLA:CPU divides element by element at half the speed of the whole update.
        scale = 1 / loss.mass
        mean = jax.tree.map(
            lambda g, p: (g.astype(accumulation_dtype(p.dtype)) * scale).astype(p.dtype), gradients, params
        )
        updates, new = hooks.update(mean, opt_state, params)
        new = jax.tree.map(lambda leaf, old: jnp.asarray(leaf, old.dtype), new, opt_state)
        return optax.apply_updates(params, updates), new

    def keep(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
        if hooks.reject is not None:
            opt_state = jax.lax.cond(finite, lambda kept: kept, hooks.reject, opt_state)
        return params, opt_state

    # Not a select per leaf: the old moments would have to outlive the new ones, which copies the state (5 times
    # slower on CPU).
    params, opt_state = jax.lax.cond(accept, update, keep, state.params, state.opt_state, gradients)
    state = state.replace(
        updates=state.updates + accept.astype(jnp.int32),
        variables={**state.variables, "params": params},
        opt_state=opt_state,
    )
    return state, accept


def _check_output(output: LossOutput, rest: dict[str, Any]) -> None:
    total = output.loss.total
    if jnp.shape(total) != () or not jnp.issubdtype(jnp.result_type(total), jnp.floating):
        raise ValueError(
            "An objective's loss total must be a floating-point scalar, the sum over the batch. "
            f"Received: shape={jnp.shape(total)}, dtype={jnp.result_type(total)}."
        )
    if "loss" in output.metrics:
        raise ValueError('The metric name "loss" is taken by the loss itself. Rename the metric.')
    unknown = sorted(set(output.variables) - set(rest))
    if unknown:
        raise ValueError(
            f"An objective may replace only collections it was given, {sorted(rest)}, and never "
            f'"params". Received: variables={unknown}.'
        )

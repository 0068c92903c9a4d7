"""Loss scaling, for gradients that would vanish in a narrow dtype.

Entry points: `dynamic_loss_scale`, `static_loss_scale`. The scale lives in the optimizer's state; the step multiplies
the loss by it before differentiation and divides the gradients in float32. Mixed Precision Training
(https://arxiv.org/abs/1710.03740, section 3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dew.training.optimizer import Optimizer, StepTransformation, as_step_transformation


class LossScaleState(NamedTuple):
    """State of an optimizer whose loss scale follows the gradients.

    Attributes:
        scale: What the loss is multiplied by, float32.
        finite_batches: Batches since the scale last changed, int32.
        inner: State of the optimizer itself.
    """

    scale: jax.Array
    finite_batches: jax.Array
    inner: Any


def dynamic_loss_scale(
    optimizer: Optimizer, *, initial_scale: float = 2.0**15, growth_batches: int = 2000, window: int = 1
) -> StepTransformation:
    """Scale the loss as far as the gradients stay finite.

    The scale doubles after a number of batches whose updates were applied, and halves where an update is rejected
    because its gradient is not finite; the weights and the moments stay as they were then.

    Args:
        optimizer: The optimizer.
        initial_scale: The first scale.
        growth_batches: Batches until the scale doubles.
        window: Batches of one update.

    Raises:
        ValueError: If a number is not positive.
    """
    if not initial_scale > 0 or growth_batches < 1:
        raise ValueError(
            "A loss scale and the batches until it doubles must be positive. "
            f"Received: initial_scale={initial_scale}, growth_batches={growth_batches}."
        )
    inner = as_step_transformation(optimizer)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(jnp.asarray(initial_scale, jnp.float32), jnp.zeros((), jnp.int32), inner.init(params))

    def update(gradients: Any, state: LossScaleState, params: Any = None) -> tuple[Any, LossScaleState]:
        changes, kept = inner.update(gradients, state.inner, params)
        batches = state.finite_batches + window
        grown = batches >= growth_batches
        scale = jnp.where(grown, state.scale * 2, state.scale)
        return changes, LossScaleState(scale, jnp.where(grown, batches - growth_batches, batches), kept)

    def reject(state: LossScaleState) -> LossScaleState:
        kept = state.inner if inner.reject is None else inner.reject(state.inner)
        return LossScaleState(state.scale * 0.5, jnp.zeros_like(state.finite_batches), kept)

    return inner._replace(
        init=init,
        update=update,
        loss_scale=lambda state: state.scale,
        reject=reject,
        after_batch=None if inner.after_batch is None else _within(inner.after_batch),
    )


def static_loss_scale(optimizer: Optimizer, factor: float) -> StepTransformation:
    """Multiply the loss by a number while it is differentiated.

    Args:
        optimizer: The optimizer.
        factor: The number.

    Raises:
        ValueError: If it is not positive.
    """
    if not factor > 0:
        raise ValueError(f"A loss scale must be positive. Received: factor={factor}.")
    return as_step_transformation(optimizer)._replace(loss_scale=lambda state: jnp.asarray(factor, jnp.float32))


def _within(after_batch: Any) -> Any:
    def run(params: Any, state: LossScaleState) -> tuple[Any, LossScaleState]:
        params, kept = after_batch(params, state.inner)
        return params, state._replace(inner=kept)

    return run

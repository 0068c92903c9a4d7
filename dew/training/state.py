"""Everything a training run carries from step to step, as one pytree of arrays.

Entry points: `TrainState`, `Accumulator`. The step functions take a state and return the next
one; they consume the old one's memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dew.objectives.base import Ratio
from dew.training.optimizer import assign_learning_rate, read_learning_rate


class Accumulator(struct.PyTreeNode):
    """Sums over the open accumulation window.

    Attributes:
        gradients: Sum of the gradients of the totals, in the parameters' structure, float32 or
            wider.
        loss: Sum of the totals and masses.
    """

    gradients: Any
    loss: Ratio


class TrainState(struct.PyTreeNode):
    """One moment of a training run.

    Attributes:
        step: Batches consumed, int32.
        microstep: Batches in the open accumulation window, int32; 0 right after an update.
        updates: Optimizer updates applied, int32.
        variables: All collections of the module, "params" among them.
        opt_state: State of the optimizer.
        key: Raw data of the run's root random key; it never changes.
        accumulator: An `Accumulator`, the sums of the open window; None when every batch is an update.
        carry: What a step of the user's own hands on; None for the engine's steps.
    """

    # The same structure also holds shapes or shardings in place of arrays.
    step: Any
    microstep: Any
    updates: Any
    variables: Any
    opt_state: Any
    key: Any
    accumulator: Any = None
    carry: Any = None

    @property
    def params(self) -> Any:
        """The trainable collection."""
        return self.variables["params"]

    @property
    def learning_rate(self) -> jax.Array | None:
        """The rate in the optimizer's state, or None when it keeps none there."""
        return read_learning_rate(self.opt_state)

    def with_learning_rate(self, value: float) -> TrainState:
        """Return this state with another learning rate for the next update.

        Args:
            value: The new rate.

        Raises:
            ValueError: If the optimizer keeps no rate in its state.
            TypeError: If the rate follows a schedule.
        """
        return self.replace(opt_state=assign_learning_rate(self.opt_state, value))


def new_state(variables: dict[str, Any], optimizer: Any, key: jax.Array, *, accumulation: int) -> TrainState:
    """Make the state before the first batch; traceable.

    Args:
        variables: All collections of the module, unboxed.
        optimizer: An optax transformation.
        key: Raw data of the root random key.
        accumulation: Batches per update.

    Returns:
        A state with zeroed counters and moments.
    """
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        microstep=jnp.zeros((), jnp.int32),
        updates=jnp.zeros((), jnp.int32),
        variables=dict(variables),
        opt_state=optimizer.init(variables["params"]),
        key=key,
        accumulator=empty_accumulator(variables["params"]) if accumulation > 1 else None,
    )


def empty_accumulator(params: Any) -> Accumulator:
    """Make the sums of a window that holds no batch yet; traceable.

    Args:
        params: Parameters, or their shapes.
    """
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, accumulation_dtype(p.dtype)), params)
    return Accumulator(zeros, Ratio(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)))


def accumulation_dtype(dtype: Any) -> Any:
    """Return the dtype gradients of such parameters are summed in: float32 or wider.

    Args:
        dtype: The parameters' dtype.
    """
    return jnp.promote_types(dtype, jnp.float32)

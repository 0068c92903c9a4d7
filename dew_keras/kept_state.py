"""A training state that outlives a `compile`: fitted to the dtypes, the loss scale and the window compiled since.

Entry points: `conformed_state`, `windowed_state`; `next_root_key`, what is kept of one that does not.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dew.training.loss_scale import LossScaleState
from dew.training.placing import abstract_state
from dew.training.state import TrainState, empty_accumulator
from dew.training.trainer import Trainer
from dew_keras.layer_arrays import shapes_of


def conformed_state(state: TrainState, trainer: Trainer) -> TrainState:
    """Give the moments of a state the dtypes of a trainer, and a loss scale where its optimizer has one.

    Args:
        state: A state that another trainer with the same optimizer left.
        trainer: The trainer that goes on.
    """
    kept: Any = state.opt_state
    optimizer: Any = trainer.optimizer
    wanted = abstract_state(shapes_of(state.variables), optimizer, trainer.accumulation).opt_state
    if isinstance(wanted, LossScaleState) and not isinstance(kept, LossScaleState):
        scale = jax.jit(lambda params: optimizer.init(params)._replace(inner=None))(state.params)
        kept = scale._replace(inner=kept)
    elif isinstance(kept, LossScaleState) and not isinstance(wanted, LossScaleState):
        kept = kept.inner

    def cast(leaf: Any, like: Any) -> Any:
        return leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)

    return state.replace(opt_state=jax.tree.map(cast, kept, wanted))


def next_root_key(state: TrainState) -> np.ndarray:
    """Make the root random key of a state that takes a state's place, under which no mask is drawn a second time.

    Args:
        state: A state between two steps.
    """
    key, step = jax.device_get((state.key, state.step))
    return np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), step)))


def windowed_state(state: TrainState, trainer: Trainer) -> TrainState:
    """Give a state the sums of an empty window, where a trainer accumulates and it has none.

    Args:
        state: A state without an open window.
        trainer: The trainer that goes on.
    """
    if trainer.accumulation == 1 or state.accumulator is not None:
        return state
    shapes = shapes_of(state.params)
    make = jax.jit(lambda: empty_accumulator(shapes), out_shardings=trainer.shardings().accumulator)
    return state.replace(accumulator=make())

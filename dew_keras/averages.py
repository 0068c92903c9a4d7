"""What callbacks look for on a Keras optimizer, lent to it while a verb runs and taken back afterwards.

Entry point: `lent`. Weights and moments are on the mesh; `keras.callbacks.SwapEMAWeights` exchanges the weights with
their moving average, and `BackupAndRestore` asks whether the optimizer is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.tree import named_leaves
from dew_keras.optimizers import CompiledOptimizer, keras_states, with_keras_states

BORROWED = ("built", "_trainable_variables", "_model_variables_moving_average")


class WeightHandle:
    """One weight on the mesh, or its moving average, as a Keras variable is read and assigned.

    Args:
        read: Gives the array.
        write: Takes an array of the same shape.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._read = read
        self._write = write

    @property
    def value(self) -> Any:
        """The array on the mesh."""
        return self._read()

    def assign(self, value: Any) -> None:
        """Replace the array.

        Args:
            value: Another handle or an array; it is copied.
        """
        old = self.value
        given = value.value if isinstance(value, WeightHandle) else value
        # A copy: steps consume the memory of weights and averages, which must not be shared.
        self._write(jnp.copy(jax.device_put(jnp.asarray(given, old.dtype), old.sharding)))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Copy to the host."""
        return np.array(self.value, dtype=dtype)


@contextlib.contextmanager
def lent(optimizer: CompiledOptimizer | None, engine: Any) -> Iterator[None]:
    """Let callbacks find weights and moving averages on the Keras optimizer, and leave it as it was.

    Args:
        optimizer: The compiled optimizer; nothing is lent to an optax transformation, or before `compile`.
        engine: Holds the weights and the training state.
    """
    objects = [] if optimizer is None or not optimizer.parts else [optimizer.public, *optimizer.parts]
    before = [(o, {name: vars(o)[name] for name in BORROWED if name in vars(o)}) for o in objects]
    try:
        for o in objects:
            # Not by assignment: a Keras optimizer would track the lists.
            vars(o)["built"] = True
        if optimizer is not None and optimizer.averages and engine.current is not None:
            for number, part in enumerate(optimizer.parts):
                if part.use_ema:
                    weights, means = _handles(engine, number)
                    vars(part).update(_trainable_variables=weights, _model_variables_moving_average=means)
        yield
    finally:
        for o, values in before:
            for name in BORROWED:
                vars(o).pop(name, None)
            vars(o).update(values)


def _handles(engine: Any, number: int) -> tuple[list[WeightHandle], list[WeightHandle]]:
    paths = list(named_leaves(keras_states(engine.current.opt_state)[number].slots["average"]))

    def weight(path: str) -> WeightHandle:
        return WeightHandle(
            lambda: named_leaves(engine.variables["params"])[path],
            lambda value: engine.assign({**engine.variables, "params": _with(engine.variables["params"], path, value)}),
        )

    def mean(path: str) -> WeightHandle:
        def write(value: Any) -> None:
            states = keras_states(engine.current.opt_state)
            slots = states[number].slots
            fresh = {**slots, "average": _with(slots["average"], path, value)}
            states[number] = states[number]._replace(slots=fresh)
            engine.replace_state(engine.current.replace(opt_state=with_keras_states(engine.current.opt_state, states)))

        return WeightHandle(
            lambda: named_leaves(keras_states(engine.current.opt_state)[number].slots["average"])[path], write
        )

    return [weight(path) for path in paths], [mean(path) for path in paths]


def _with(tree: Any, path: str, value: Any) -> Any:
    return jax.tree.unflatten(
        jax.tree.structure(tree), [value if name == path else leaf for name, leaf in named_leaves(tree).items()]
    )

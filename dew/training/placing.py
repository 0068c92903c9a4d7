"""Where the arrays of a training state live, and how given values get there.

Entry points: `abstract_state`, `state_shardings`, `place_variables`. Gradients sums and
optimizer moments follow their parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dew.nn.sharding import unboxed
from dew.placement.layout import Layout
from dew.training.optimizer import Optimizer
from dew.training.state import TrainState, new_state
from dew.tree import closest, named_leaves


def plain(variables: Any) -> Any:
    """Strip every kind of Flax box from a tree, without constraining the values.

    Args:
        variables: Values or shapes, some in boxes that declare names.
    """
    return nn.meta.unbox(unboxed(variables))


def abstract_state(variables: Any, optimizer: Optimizer, accumulation: int) -> TrainState:
    """Compute the shapes of a state without making it.

    Args:
        variables: Shapes of all collections, unboxed.
        optimizer: An optax transformation.
        accumulation: Batches per update.

    Returns:
        A state of shapes and dtypes.
    """

    def make(values: Any) -> TrainState:
        key = jax.random.key_data(jax.random.key(0))
        return new_state(values, optimizer, key, accumulation=accumulation)

    return jax.eval_shape(make, variables)


def state_shardings(layout: Layout, mesh: Mesh, state: TrainState, variables: Any) -> TrainState:
    """Give every array of a state its place.

    Args:
        layout: The rules.
        mesh: The mesh.
        state: Shapes of the state.
        variables: NamedShardings of all collections.

    Returns:
        A state of NamedShardings; what belongs to no parameter is whole on every device.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    shapes, places = named_leaves(state.params), named_leaves(variables["params"])
    reference = {path: (leaf.shape, places[path]) for path, leaf in shapes.items()}
    follow = lambda tree: layout.shardings_like(mesh, tree, reference)  # noqa: E731
    accumulator = state.accumulator
    if accumulator is not None:
        accumulator = accumulator.replace(
            gradients=follow(accumulator.gradients), loss=jax.tree.map(lambda _: whole, accumulator.loss)
        )
    return TrainState(
        step=whole,
        microstep=whole,
        updates=whole,
        variables=variables,
        opt_state=follow(state.opt_state),
        key=whole,
        accumulator=accumulator,
        carry=jax.tree.map(lambda _: whole, state.carry),
    )


def place_variables(variables: Any, shapes: Any, shardings: Any) -> Any:
    """Move given values to their shardings, in the dtypes the module declares.

    Args:
        variables: Arrays, unboxed.
        shapes: The shapes and dtypes the module declares.
        shardings: NamedShardings in the same structure.

    Returns:
        Placed arrays; those that were in place already are the ones given.

    Raises:
        ValueError: If a value is missing, unknown or has another shape.
    """
    check_alive(variables)
    given, wanted, places = named_leaves(variables), named_leaves(shapes), named_leaves(shardings)
    _check_values(given, wanted)
    leaves = [_place(given[path], wanted[path].dtype, places[path]) for path in wanted]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def check_alive(variables: Any) -> None:
    """Refuse arrays whose memory a training step took over; computing with them can end the process.

    Args:
        variables: Arrays.

    Raises:
        ValueError: If one is gone.
    """
    for leaf in jax.tree.leaves(variables):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                "These weights were consumed by a training run, which updates them in place: an array of shape "
                f"{leaf.shape} is deleted. Use state.variables of what fit returned, or loop.state.variables; or train "
                "on a copy: jax.tree.map(jax.numpy.copy, variables)."
            )


def _place(value: Any, dtype: Any, sharding: NamedSharding) -> jax.Array:
    placed = value if getattr(value, "sharding", None) == sharding else jax.device_put(value, sharding)
    if placed.dtype == dtype:
        return placed
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)(placed)


def _check_values(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    for path in given:
        if path not in wanted:
            near = closest(path, wanted)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ValueError(f"The module has no variable {path!r}.{hint}")
    missing = [path for path in wanted if path not in given]
    if missing:
        raise ValueError(f"Values are missing for {len(missing)} variables: {missing[:5]}.")
    for path, leaf in wanted.items():
        shape = jnp.shape(given[path])
        if shape != leaf.shape:
            raise ValueError(f"{path} must have shape {leaf.shape}. Received: shape={shape}.")

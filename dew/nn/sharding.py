"""Logical names of weights and activations inside a model: declare, pin, gather at use.

Entry points: `declare` for a weight, `constrain` for an activation, `gather_weights` for the weights of a
layer. Without a mesh in context (`jax.set_mesh`) all of them leave the program as it is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dew.arrays import Array, Float
from dew.placement.rules import DEFAULT_RULES, STAGE, resolve

GATHERED = "gathered_weight"
"""Residual name of a weight's gathered copy: no remat policy keeps it."""
GATHERED_AXES = ("fsdp", STAGE)
"""Mesh axes that store a weight in parts and compute with it whole."""

Initializer = Callable[..., Array]


def declare(
    module: nn.Module,
    name: str,
    shape: Sequence[int],
    names: Sequence[str | None],
    initializer: Initializer,
    dtype: Any,
) -> Array:
    """Declare a weight of a module, once for initialisation, sharding, loading and export.

    Args:
        module: The module that owns the weight; called in its `setup`.
        name: Name of the weight below the module's path.
        shape: Shape of the weight.
        names: Logical name of each dimension, one of the rule table's; None keeps a dimension whole.
        initializer: Function of (key, shape, dtype).
        dtype: Storage dtype.

    Returns:
        The value bound to the module, or its initial value.

    Raises:
        ValueError: If the bound value has another shape, or names and shape differ in length.
    """
    shape = tuple(shape)
    if len(names) != len(shape):
        raise ValueError(f"weight {name!r} of shape {shape} needs {len(shape)} logical names. Received: names={names}")
    if module.has_variable("params", name):
        value = unboxed(module.get_variable("params", name))
        if value.shape != shape:
            path = "/".join((*module.path, name))
            raise ValueError(f"weight {path!r} must have shape {shape}. Received: shape={tuple(value.shape)}")
        return value
    boxed = nn.with_logical_partitioning(initializer, tuple(names))
    return unboxed(module.param(name, boxed, shape, dtype, unbox=False))


def unboxed(tree: Any) -> Any:
    """Strip the boxes that carry logical names, without constraining the values."""
    return jax.tree.map(
        lambda leaf: leaf.unbox(apply_constraint=False) if isinstance(leaf, nn.LogicallyPartitioned) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned),
    )


def without_mesh() -> Any:
    """Leave the mesh in context, as `with without_mesh():`, for code whose placement does not matter."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def constrain(x: Array, names: Sequence[str | None]) -> Array:
    """Pin an activation to the mesh axes that the active rules give its logical names.

    A name whose axes do not divide its dimension falls back to its next rule, or stays whole. The rules are
    those of `flax.linen.logical_axis_rules`, the default table where none are active.

    Args:
        x: The activation.
        names: Logical name per dimension; None keeps the dimension whole.

    Returns:
        `x`, constrained; `x` itself when no mesh is in context.

    Raises:
        ValueError: If `names` does not name every dimension.
    """
    if len(names) != x.ndim:
        raise ValueError(f"constrain needs a name per dimension of {x.shape}. Received: names={tuple(names)}")
    mesh = jax.sharding.get_abstract_mesh()
    if is_trivial_mesh(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _spec(tuple(names), x.shape, mesh)))


def constrain_weights(weights: Any, names: Any) -> Any:
    """Pin weights, or sums of their gradients, to the parts in which they are stored.

    Args:
        weights: Weights of one part, a pytree of arrays.
        names: The same tree with a tuple of logical names per weight.
    """
    return jax.tree.map(constrain, weights, names)


def gathers_weights() -> bool:
    """Say whether the mesh in context stores weights of layers in parts that are gathered where they are used."""
    mesh = jax.sharding.get_abstract_mesh()
    return not is_trivial_mesh(mesh) and any(mesh.shape.get(axis, 1) > 1 for axis in GATHERED_AXES if axis != STAGE)


def gather_weights(weights: Any, names: Any) -> Any:
    """Gather each weight over the axes that only store it, at the point of use.

    The backward pass leaves the gradient in the weight's stored parts, so a layer's whole gradient lives only
    until its reduction. Call it inside the layer loop, under `dew.nn.remat.checkpointed`, and the copies are made
    again in the backward pass instead of being kept.

    Args:
        weights: Weights of one layer, a pytree of arrays.
        names: The same tree with a tuple of logical names per weight.

    Returns:
        The weights, whole over fsdp, and tables over stages; still split over tensor.
    """
    if is_trivial_mesh(jax.sharding.get_abstract_mesh()):
        return weights
    return jax.tree.map(_gathered, weights, names)


def _gathered(weight: Array, names: tuple[str | None, ...]) -> Array:
    """Gather one weight; its cotangent goes back to the stored parts."""
    mesh = jax.sharding.get_abstract_mesh()
    stored = _spec(names, weight.shape, mesh)
    whole = PartitionSpec(*(_without(axes, GATHERED_AXES) for axes in stored))
    if whole == stored:
        return weight
    if weight.ndim == 1:
        # Scales and biases are stored whole where they are below the layout's min_shard, which a model does not know.
        # Pinned whole they cost nothing then, and a gather where they are stored in parts.
        return checkpoint_name(jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, whole)), GATHERED)
    return checkpoint_name(_resharded(weight, NamedSharding(mesh, stored), NamedSharding(mesh, whole)), GATHERED)


def _gather(weight: Array, stored: NamedSharding, whole: NamedSharding) -> Array:
    # Naming the stored parts first puts the gather behind the loop's slice of the bank. Without it XLA gathers the
    # slice [1, ...] and, to lay the gathered dimension out first, copies each device's part of the whole bank.
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(weight, stored), whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _resharded(weight: Array, stored: NamedSharding, whole: NamedSharding) -> Array:
    return _gather(weight, stored, whole)


def _resharded_forward(weight, stored, whole):
    return _gather(weight, stored, whole), None


def _resharded_backward(stored, whole, residuals, cotangent):
    return (jax.lax.with_sharding_constraint(cotangent, stored),)


_resharded.defvjp(_resharded_forward, _resharded_backward)


def activation_spec(names: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """Say where the mesh in context and the active rules put an activation, as `constrain` does.

    Args:
        names: Logical name per dimension.
        shape: Its shape.
    """
    return _spec(tuple(names), tuple(shape), jax.sharding.get_abstract_mesh())


def weight_spec(names: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """Say where a weight is once `gather_weights` has gathered it.

    Args:
        names: Logical name per dimension.
        shape: Its shape.
    """
    return PartitionSpec(*(_without(axes, GATHERED_AXES) for axes in activation_spec(names, shape)))


def route_lookup_gradient(
    rows: Float[Array, "B T D"], names: Sequence[str], table_shape: tuple[int, int], table_names: Sequence[str | None]
) -> Float[Array, "B T D"]:
    """Send the gradient of looked-up rows to the devices that store their columns of the table.

    The table's gradient scatters the rows' gradient. Its columns go to their owners by an all-to-all over the axes
    that store them; left alone, GSPMD gathers the whole batch's gradient on every device of a data and fsdp mesh.

    Args:
        rows: Rows of the table, one per token.
        names: Logical names of `rows`.
        table_shape: Shape of the table, [V, D].
        table_names: Logical names of the table.

    Returns:
        `rows`; only their cotangent is pinned.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if is_trivial_mesh(mesh):
        return rows
    columns = _padded(_spec(tuple(table_names), table_shape, mesh), 2)[1]
    if columns is None:
        return rows
    taken = (columns,) if isinstance(columns, str) else columns
    pinned = [_without(axes, taken) for axes in _padded(_spec(tuple(names), rows.shape, mesh), 3)]
    pinned[2] = columns
    return _routed(rows, NamedSharding(mesh, PartitionSpec(*pinned)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _routed(rows: Array, backward: NamedSharding) -> Array:
    return rows


_routed.defvjp(
    lambda rows, backward: (rows, None),
    lambda backward, residuals, cotangent: (jax.lax.with_sharding_constraint(cotangent, backward),),
)


def _padded(spec: PartitionSpec, rank: int) -> tuple[Any, ...]:
    return (*spec, *(None,) * (rank - len(spec)))


def is_trivial_mesh(mesh: Any) -> bool:
    """Say whether a mesh leaves nothing to place: none in context, one device, or every axis manual."""
    return mesh.empty or mesh.size == 1 or set(mesh.manual_axes) >= set(mesh.axis_names)


def _spec(names: tuple[str | None, ...], shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
    """Resolve logical names on the mesh in context, leaving axes that a shard_map holds manual alone."""
    rules = nn.get_logical_axis_rules() or DEFAULT_RULES
    manual = tuple(mesh.manual_axes)
    if manual:
        rules = tuple((name, _without(axes, manual)) for name, axes in rules)
    return resolve(names, shape, mesh, rules).spec


def _without(axes: Any, removed: Sequence[str]) -> Any:
    """Drop mesh axes from one entry of a partition spec or a rule."""
    if axes is None:
        return None
    kept = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if axis not in removed)
    return kept if len(kept) > 1 else (kept[0] if kept else None)

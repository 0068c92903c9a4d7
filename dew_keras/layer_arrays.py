"""Trees of device arrays as host arrays by per-layer name, and back onto the devices.

Entry points: `host_layers`, `onto`. A bank's leaf has one name per layer, so what is written from one storage of
layers, mesh or number of processes is read into any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.placement.processes import host_value
from dew.placement.stacks import StackView
from dew.tree import map_named, named_leaves


def layer_names(path: str, shape: tuple[int, ...], view: StackView) -> tuple[str, ...]:
    """Name what one stored leaf holds.

    Args:
        path: Path of the leaf.
        shape: Its shape.
        view: How layers are stored.

    Returns:
        One name per layer of its bank; the path itself outside banks, and for a leaf that has no layers to split,
        as some optimizers keep.
    """
    bank = view.bank_of(path)
    if bank is None or not shape or shape[0] != len(bank.layers):
        return (path,)
    return view.logical_paths(path)


def host_layers(tree: Any, view: StackView) -> Iterator[tuple[str, np.ndarray]]:
    """Copy a tree to the host, one leaf after another; all processes consume it together.

    Args:
        tree: Any tree of arrays.
        view: How it stores layers.

    Yields:
        Per-layer name and array.
    """
    for path, leaf in named_leaves(tree).items():
        value = host_value(leaf)
        names = layer_names(path, value.shape, view)
        yield from [(path, value)] if names == (path,) else zip(names, value, strict=True)


def layer_shapes(tree: Any, view: StackView) -> dict[str, jax.ShapeDtypeStruct]:
    """List the shapes and dtypes that `host_layers` gives, without reading anything.

    Args:
        tree: Any tree of arrays or shapes.
        view: How it stores layers.
    """
    shapes = {}
    for path, leaf in named_leaves(tree).items():
        names = layer_names(path, tuple(leaf.shape), view)
        for name in names:
            shape = leaf.shape if names == (path,) else leaf.shape[1:]
            shapes[name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    return shapes


def onto(tree: Any, values: Mapping[str, Any], view: StackView) -> Any:
    """Put host arrays where a tree's leaves are, in their dtypes.

    Args:
        tree: Placed arrays.
        values: Arrays by per-layer name, of the shapes that `layer_shapes` gives; what is missing keeps its value.
        view: How the tree stores layers.

    Returns:
        The tree with new arrays.
    """

    def replaced(path: str, leaf: Any) -> Any:
        names = layer_names(path, tuple(leaf.shape), view)
        missing = [name for name in names if name not in values]
        if len(missing) == len(names):
            return leaf
        if names == (path,):
            return place_like(values[path], leaf)
        old = host_value(leaf) if missing else None
        layers = [values[name] if old is None or name in values else old[i] for i, name in enumerate(names)]
        return place_like(np.stack(layers), leaf)

    return map_named(replaced, tree)


def place_like(value: Any, leaf: jax.Array) -> jax.Array:
    """Put an array where another one is, in its dtype.

    Args:
        value: A host array that every process has, or an array on devices.
        leaf: The array whose place and dtype it takes.
    """
    if isinstance(value, jax.Array):
        return jax.device_put(value.astype(leaf.dtype), leaf.sharding)
    # A copy: the device may use a host array's memory, and the caller may change the array.
    host = np.array(value).astype(leaf.dtype, copy=False)
    if leaf.sharding.is_fully_addressable:
        return jax.device_put(host, leaf.sharding)
    return jax.make_array_from_callback(host.shape, leaf.sharding, lambda index: host[index])


def shapes_of(tree: Any) -> Any:
    """Write shapes and dtypes in place of arrays.

    Args:
        tree: Any tree of arrays.
    """
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)


def check_structure(given: Any, wanted: Any) -> None:
    """Refuse variables that are not a module's.

    Args:
        given: The variables.
        wanted: Shapes of the module's.

    Raises:
        ValueError: If a path or a shape differs.
    """
    found, expected = named_leaves(given), named_leaves(wanted)
    different = sorted(set(found) ^ set(expected))
    if different:
        raise ValueError(f"The variables given do not have the module's structure; they differ at {different[:5]}.")
    for path, leaf in expected.items():
        if tuple(jnp.shape(found[path])) != tuple(leaf.shape):
            raise ValueError(f"{path} must have shape {leaf.shape}. Received: shape={jnp.shape(found[path])}.")

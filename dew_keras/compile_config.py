"""What `compile` was given as JSON data, and back.

Entry points: `compile_config`, `compile_arguments`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import keras

from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec
from dew_keras.compiled import SAMPLERS

KERAS_ARGUMENTS = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")


def compile_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the arguments of `compile`.

    Args:
        arguments: What it was given, by name.

    Returns:
        JSON values by name.

    Raises:
        ValueError: If an argument cannot be described: an optax transformation, a lambda.
    """
    found = dict(arguments)
    for name in KERAS_ARGUMENTS:
        _check_named(name, found[name])
        found[name] = keras.saving.serialize_keras_object(found[name])
    found["mesh"] = _described_mesh(found["mesh"])
    if isinstance(found["layout"], Layout):
        found["layout"] = dataclasses.asdict(found["layout"])
    if not isinstance(found["sampler"], str | None):
        found["sampler"] = [type(found["sampler"]).__name__, dataclasses.asdict(found["sampler"])]
    found["dtype"] = getattr(found["dtype"], "name", found["dtype"])
    return found


def compile_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the arguments of `compile` from their description.

    Args:
        config: What `compile_config` returned, possibly read from JSON.

    Returns:
        The arguments by name.

    Raises:
        ValueError: If it describes something that is unknown here.
    """
    found = dict(config)
    for name in KERAS_ARGUMENTS:
        found[name] = keras.saving.deserialize_keras_object(found[name])
    if found["layout"] is not None:
        layout = dict(found["layout"])
        layout["rules"] = tuple((name, _as_tuple(axes)) for name, axes in layout["rules"])
        found["layout"] = Layout(**{name: _as_tuple(value) for name, value in layout.items()})
    if not isinstance(found["sampler"], str | None):
        name, fields = found["sampler"]
        known = {cls.__name__: cls for cls in SAMPLERS.values()}
        if name not in known:
            raise ValueError(f"sampler must be one of {sorted(known)}. Received: {name!r}")
        found["sampler"] = known[name](**fields)
    return found


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _described_mesh(mesh: Any) -> Any:
    if isinstance(mesh, MeshSpec):
        return dataclasses.asdict(mesh)
    if isinstance(mesh, jax.sharding.Mesh):
        return {axis: size for axis, size in mesh.shape.items() if size > 1}
    return None if mesh is None else dict(mesh)


def _check_named(argument: str, value: Any) -> None:
    if argument == "optimizer" and not isinstance(value, str | dict | keras.optimizers.Optimizer):
        raise ValueError(
            "An optax transformation is made of functions and cannot be written into a file. Save the weights alone, "
            "or compile with a Keras optimizer."
        )
    for item in jax.tree.leaves(value, is_leaf=lambda node: not isinstance(node, list | tuple | dict)):
        if getattr(item, "__name__", "") == "<lambda>":
            raise ValueError(f"A lambda in `{argument}` cannot be written into a file. Use a function with a name.")

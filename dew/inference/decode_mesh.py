"""Where decoding runs: a mesh of the same devices without the axes that a token at a time cannot use.

Entry points: `decode_mesh` says which mesh, `decode_place` which of those that folding gives, `decode_view` gives
weights on it without a copy where each device holds its parts already, `move_leaf_by_leaf` brings them to any other
mesh with one leaf twice at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dew.nn.sharding import unboxed
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.memory import bytes_per_device
from dew.placement.mesh import AXES, MeshSpec, as_mesh
from dew.placement.rules import spec_axes
from dew.placement.stacks import StackView
from dew.tree import map_named, named_leaves

FOLDED_AXES = ("sequence", "stage")
"""Axes that decoding turns into data."""


def decode_mesh(
    mesh: Mesh, wanted: Mesh | MeshSpec | Mapping[str, int] | None = None, *, stored: Collection[str] = ()
) -> Mesh:
    """Say on which mesh a model that lives on `mesh` decodes.

    Args:
        mesh: The mesh of the weights, with the six axes.
        wanted: A mesh of the same devices, a spec or a mapping of its fields; None folds sequence and stage into data.
        stored: Axes that fold into fsdp instead, such as those that hold weights in parts: where fsdp then divides the
            weights, a device holds no more of the model than before.

    Returns:
        The mesh; `mesh` itself where there is nothing to fold.

    Raises:
        TypeError: If what is wanted is no mesh in any spelling of `dew.placement.as_mesh`.
        ValueError: If the mesh wanted has other devices, or its factors are none or do not divide them.
        LayoutRefused: If the mesh wanted splits positions or stages.
    """
    if wanted is None:
        return _folded(mesh, stored)
    found = as_mesh(wanted, list(mesh.devices.flat))
    if set(found.devices.flat) != set(mesh.devices.flat):
        raise ValueError(
            f"Decoding moves weights between the devices they are on: the mesh {_factors(found)} has {found.size} "
            f"device(s), not the same {mesh.size} as the model's {_factors(mesh)}. Build it from mesh.devices."
        )
    for axis in FOLDED_AXES:
        if found.shape[axis] > 1:
            raise LayoutRefused(
                f"Decoding on {axis}={found.shape[axis]}: it computes one token of a row at a time, which that axis "
                "cannot split. Give these devices to data, fsdp or tensor."
            )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlace:
    """Where the weights of a model are while it decodes.

    Attributes:
        mesh: The mesh, concrete or planned as that of training.
        shardings: Where every weight is.
        bytes: Bytes of weights that one device holds.
    """

    mesh: Any
    shardings: Any
    bytes: int


def decode_place(mesh: Any, layout: Layout, declared: Any, stacks: StackView) -> DecodePlace:
    """Choose where a model decodes that is laid out on a mesh, by the bytes a device then holds.

    Stages hold layers in parts. Folded into fsdp they hold other parts of all layers, unless its larger number does not
    divide the weights; folded into data they hold copies. Of what `Layout.check` accepts, the smaller one is taken.

    Args:
        mesh: The mesh of training, concrete or planned.
        layout: The rules.
        declared: The variables in the boxes that declare their names, in the dtype they are held in.
        stacks: How banks stand for layers.

    Returns:
        The place; the mesh itself where there is nothing to fold.

    Raises:
        LayoutRefused: If either leaves too much of the model whole on every device.
    """
    trained = layout.shardings(mesh, declared)
    used = {axis for place in jax.tree.leaves(trained) for axis in spec_axes(place.spec)}
    stored = tuple(axis for axis in FOLDED_AXES if axis in used)
    found, refusals = [], []
    for into_fsdp in dict.fromkeys((stored, ())):
        folded = _folded(mesh, into_fsdp)
        shardings = layout.shardings(folded, declared)
        try:
            if stored:
                layout.check(folded, declared, shardings, stacks)
        except LayoutRefused as refusal:
            refusals.append(str(refusal))
            continue
        held = bytes_per_device(unboxed(declared), shardings)
        found.append(DecodePlace(mesh=folded, shardings=shardings, bytes=held))
    if not found:
        raise LayoutRefused(
            f"Without its {' and '.join(stored)} axis the mesh cannot hold the model to generate. {refusals[0]} "
            "Or name another mesh of the same devices: generate(..., mesh=...)."
        )
    return min(found, key=lambda place: place.bytes)


def _folded(mesh: Any, stored: Collection[str] = ()) -> Any:
    """Turn the folded axes into data, or fsdp, each device keeping its place on the other axes.

    A sequence axis splits positions and a stage axis layers that run one after the other: neither splits one token of
    one row. Where weights are whole over them, a device's parts stay where they are: nothing is sent, no memory is
    taken, and rows spread over more devices. As tensor they would cut the time of a token, but the whole weights would
    have to come back for the next training step: that is for a mesh named by the caller.
    """
    if all(mesh.shape[axis] == 1 for axis in FOLDED_AXES):
        return mesh
    parts = {axis: [axis] for axis in AXES if axis not in FOLDED_AXES}
    for axis in FOLDED_AXES:
        parts["fsdp" if axis in stored else "data"].append(axis)
    order = [AXES.index(axis) for together in parts.values() for axis in together]
    sizes = {axis: math.prod(mesh.shape[name] for name in together) for axis, together in parts.items()}
    shape = [sizes.get(axis, 1) for axis in AXES]
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Mesh(mesh.devices.transpose(order).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def stored_axes(variables: Any) -> tuple[str, ...]:
    """List the axes decoding folds that hold some of the weights in parts, so that no view of these exists.

    Args:
        variables: Placed arrays.
    """
    places = [leaf.sharding for leaf in jax.tree.leaves(variables)]
    used = {axis for place in places if isinstance(place, NamedSharding) for axis in spec_axes(place.spec)}
    return tuple(axis for axis in FOLDED_AXES if axis in used)


def _factors(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "of one device"


def decode_view(variables: Any, mesh: Mesh) -> Any:
    """Give weights on a folded mesh, sharing the memory of those given.

    Args:
        variables: Arrays on a mesh.
        mesh: What `decode_mesh` made of that mesh.

    Returns:
        The tree; each array is a second name for the parts its devices hold.

    Raises:
        LayoutRefused: If an array is split over an axis that was folded, or made larger by that, or is not placed on
            the mesh: no view of it exists.
    """

    def view(path: str, leaf: jax.Array) -> jax.Array:
        spec = getattr(leaf.sharding, "spec", PartitionSpec())
        sharding = NamedSharding(mesh, spec)
        if not holds_the_same(leaf, sharding):
            raise LayoutRefused(f"{path} {leaf.shape} is {_unviewed(variables, leaf, mesh)}")
        return _as_view(leaf, sharding)

    return map_named(view, variables)


def _unviewed(variables: Any, leaf: jax.Array, mesh: Mesh) -> str:
    """Say why an array has no view on a folded mesh, and what to do."""
    stored, own = stored_axes(variables), leaf.sharding
    if not isinstance(own, NamedSharding) or own.device_set != set(mesh.devices.flat):
        return (
            f"placed by {type(own).__name__} on {len(own.device_set)} device(s), and not on the mesh of "
            f"{mesh.size} that decodes. Place it there first: jax.device_put(variables, layout.shardings(mesh, "
            "variables))."
        )
    if stored:
        return (
            f"split as {own.spec}, over an axis that decoding folds into data, so it has no view there. Move the "
            f"weights first, with move_leaf_by_leaf onto decode_mesh(mesh, stored={stored}), as dew_keras' generate "
            "does; or load them for another mesh."
        )
    axes = [axis for axis in spec_axes(own.spec) if own.mesh.shape[axis] != mesh.shape[axis]]
    grown = ", ".join(f"{axis}={own.mesh.shape[axis]} into {axis}={mesh.shape[axis]}" for axis in axes)
    return (
        f"split as {own.spec}, and decoding folds other axes into that: it turns {grown}, whose parts are others. Move "
        "the weights first, with move_leaf_by_leaf to shardings on decode_mesh(mesh), as dew_keras' generate does for "
        "a mesh named: generate(..., mesh=...)."
    )


def holds_the_same(leaf: jax.Array, sharding: NamedSharding) -> bool:
    """Say whether every device holds the very part of an array that a sharding gives it."""
    if leaf.sharding.device_set != sharding.device_set:
        return False
    held, wanted = (place.devices_indices_map(leaf.shape) for place in (leaf.sharding, sharding))
    return held == wanted


def _as_view(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    parts = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def move_leaf_by_leaf(
    read: Callable[[], Any], write: Callable[[Any], None], shardings: Any, *, frees: bool = False
) -> None:
    """Bring an owner's weights to other places, one leaf after the other.

    After every leaf the owner holds a whole tree of valid arrays, so an error or an interrupt loses nothing. At most
    one leaf exists twice, unless somebody else holds the old ones.

    Args:
        read: Gives the owner's tree.
        write: Makes the owner hold another tree instead.
        shardings: NamedShardings in the tree's structure.
        frees: Free each old leaf whoever holds it. For arrays that were made to be given up.
    """
    for path, sharding in named_leaves(shardings).items():
        _move_one(read, write, path, sharding, frees)


def _move_one(read: Any, write: Any, path: str, sharding: NamedSharding, frees: bool) -> None:
    """Move one leaf; its old array has no name left when this returns."""
    tree = read()
    old = named_leaves(tree)[path]
    if old.sharding == sharding:
        return
    shares = holds_the_same(old, sharding)
    # Waited for: the next leaf's copy must not begin while this one's source lives.
    new = _as_view(old, sharding) if shares else jax.block_until_ready(jax.device_put(old, sharding))
    write(map_named(lambda name, leaf: new if name == path else leaf, tree))
    if frees and not shares:
        old.delete()

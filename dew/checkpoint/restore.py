"""Read a checkpoint into a tree that may store its layers in other banks and on another mesh.

Entry point: `read_tree`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dew.checkpoint.manifest import Manifest, compare
from dew.placement.stacks import StackView
from dew.tree import named_leaves, nested


def read_tree(read: Callable[[Any], Any], stored: Manifest, template: Any, stacks: StackView) -> Any:
    """Read arrays as they were saved and hand them over as the caller stores them.

    Args:
        read: Reads nested mappings of ShapeDtypeStructs, in the structure that was saved.
        stored: The checkpoint's manifest.
        template: Tree of ShapeDtypeStructs that carry NamedShardings.
        stacks: How the template stores layers.

    Returns:
        The template's tree with arrays.

    Raises:
        ValueError: If the checkpoint's leaves are not the template's.
    """
    wanted = nested(named_leaves(template))
    compare(stored, wanted, stacks)
    arrays = read(wanted) if stored.stacks == stacks else _restacked(read, stored, wanted, stacks)
    by_path = named_leaves(arrays)
    return jax.tree.unflatten(jax.tree.structure(template), [by_path[path] for path in named_leaves(template)])


def _restacked(read: Callable[[Any], Any], stored: Manifest, wanted: Any, stacks: StackView) -> Any:
    """Read the saved banks, each layer placed as the caller places it, and regroup the layers on the devices."""
    saved: dict[str, jax.ShapeDtypeStruct] = {}
    leaves = named_leaves(wanted)
    for path, (shape, dtype) in stored.leaves.items():
        target, row = stacks.physical(path)
        sharding = leaves[target].sharding
        layer_spec = sharding.spec if row is None else PartitionSpec(*sharding.spec[1:])
        source, _ = stored.stacks.physical(path)
        bank = stored.stacks.bank_of(source)
        if bank is not None:
            shape = (len(bank.layers), *shape)
            layer_spec = PartitionSpec(None, *layer_spec)
        saved[source] = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(sharding.mesh, layer_spec))
    places = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    regroup = jax.jit(lambda tree: stacks.stack(stored.stacks.unstack(tree)), out_shardings=places)
    return regroup(read(nested(saved)))

"""Runs of like layers stored as one bank `[L, ...]` per weight, under names that stay per layer.

The physical tree holds `params/layers_0_29/mlp/gate_proj/kernel`; rules, globs, checkpoints and exports see
`params/layers_3/mlp/gate_proj/kernel`. Entry points: `StackView`, `stack_view`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dew.arrays import PyTree
from dew.tree import named_leaves

__all__ = ["Bank", "StackView", "is_box", "stack_view"]


@dataclasses.dataclass(frozen=True)
class Bank:
    """One run of like layers.

    Attributes:
        name: Name of the physical module, `layers_0_29`.
        layers: Names of the layers it holds, in order of the leading dimension.
    """

    name: str
    layers: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"Bank {self.name!r} holds no layers: give at least one.")


@dataclasses.dataclass(frozen=True)
class StackView:
    """Translate between the physical banks of a model and its logical per-layer tree.

    It works below any collection and inside any tree that holds a collection (gradients, optimizer moments).

    Attributes:
        banks: The banks of the model; a layer outside every bank is stored under its own name.
    """

    banks: tuple[Bank, ...] = ()

    def __post_init__(self) -> None:
        names = [bank.name for bank in self.banks]
        layers = [layer for bank in self.banks for layer in bank.layers]
        twice = sorted({name for name in [*names, *layers] if [*names, *layers].count(name) > 1})
        if twice:
            raise ValueError(f"Banks and layers must have distinct names. Repeated: {twice}")

    def bank_of(self, physical_path: str) -> Bank | None:
        """Find the bank a physical path goes through, or None."""
        parts = physical_path.split("/")
        return next((bank for bank in self.banks if bank.name in parts), None)

    def logical_paths(self, physical_path: str) -> tuple[str, ...]:
        """List the per-layer paths one stored leaf stands for, in order of its leading dimension.

        Args:
            physical_path: Path of a stored leaf.

        Returns:
            One path per layer of its bank, or the path itself outside every bank.
        """
        bank = self.bank_of(physical_path)
        if bank is None:
            return (physical_path,)
        return tuple(_replaced(physical_path, bank.name, layer) for layer in bank.layers)

    def title(self, physical_path: str) -> str:
        """Write a stored leaf's path for people: per layer, with the run of layers it covers.

        Args:
            physical_path: Path of a stored leaf.

        Returns:
            For example `params/layers_0..29/mlp/gate_proj/kernel`; `layers_0..24:2` is every second layer.
        """
        bank = self.bank_of(physical_path)
        if bank is None:
            return physical_path
        first, last = bank.layers[0], bank.layers[-1]
        run = first if len(bank.layers) == 1 else f"{first}..{last.rsplit('_', 1)[-1]}{_step(bank)}"
        return _replaced(physical_path, bank.name, run)

    def physical(self, logical_path: str) -> tuple[str, int | None]:
        """Say where a per-layer path is stored.

        Args:
            logical_path: Path as rules and checkpoints see it.

        Returns:
            The stored path and the index along its leading dimension; None for a leaf outside every bank.
        """
        parts = logical_path.split("/")
        for bank in self.banks:
            for index, layer in enumerate(bank.layers):
                if layer in parts:
                    return _replaced(logical_path, layer, bank.name), index
        return logical_path, None

    def unstack(self, tree: PyTree) -> PyTree:
        """Write a physical tree as the logical one, slicing each bank.

        Args:
            tree: Nested mappings, tuples and lists; leaves of a bank are arrays, shapes or boxes `[L, ...]`.

        Returns:
            The same tree with one entry per layer.

        Raises:
            ValueError: If a leaf of a bank does not have the bank's length.
        """
        return _walk(tree, self._unstack_mapping)

    def stack(self, tree: PyTree) -> PyTree:
        """Write a logical tree as the physical one: the inverse of `unstack`.

        Args:
            tree: Nested mappings, tuples and lists with one entry per layer.

        Returns:
            The same tree with one entry per bank, leaves `[L, ...]`.

        Raises:
            ValueError: If a bank's layers are there in part, or differ in structure.
        """
        return _walk(tree, self._stack_mapping)

    def logical_shapes(self, tree: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
        """List the shape of every leaf by its logical path.

        Args:
            tree: A physical tree of arrays or shapes.

        Returns:
            Logical path to shape and dtype.
        """
        shapes = {}
        for path, leaf in named_leaves(nn.meta.unbox(tree)).items():
            banked = self.bank_of(path) is not None
            for logical in self.logical_paths(path):
                shapes[logical] = jax.ShapeDtypeStruct(leaf.shape[1:] if banked else leaf.shape, leaf.dtype)
        return shapes

    def _unstack_mapping(self, node: Mapping[str, Any]) -> dict[str, Any]:
        banks = {bank.name: bank for bank in self.banks}
        out: dict[str, Any] = {}
        for key, value in node.items():
            bank = banks.get(key)
            if bank is None:
                out[key] = self.unstack(value)
                continue
            for index, layer in enumerate(bank.layers):
                out[layer] = jax.tree.map(
                    lambda leaf, index=index, bank=bank: _slice(leaf, index, bank), value, is_leaf=is_box
                )
        return out

    def _stack_mapping(self, node: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        done: set[str] = set()
        owner = {layer: bank for bank in self.banks for layer in bank.layers}
        for key, value in node.items():
            bank = owner.get(key)
            if bank is None:
                out[key] = self.stack(value)
            elif bank.name not in done:
                done.add(bank.name)
                missing = [layer for layer in bank.layers if layer not in node]
                if missing:
                    raise ValueError(f"Bank {bank.name!r} needs all of its layers; the tree lacks {missing}.")
                layers = [node[layer] for layer in bank.layers]
                out[bank.name] = jax.tree.map(lambda *leaves: _stacked(leaves), *layers, is_leaf=is_box)
        return out


def stack_view(module: Any) -> StackView:
    """Ask a module how it stores its layers.

    Args:
        module: Any Flax module; one that stores banks has a method `stack_view`.

    Returns:
        The module's view, or an empty one.
    """
    method = getattr(module, "stack_view", None)
    return method() if callable(method) else StackView()


def is_box(leaf: Any) -> bool:
    """Say whether a leaf is a Flax box that declares logical dimension names."""
    return isinstance(leaf, nn.meta.AxisMetadata)


def _step(bank: Bank) -> str:
    """Write the distance of a bank's layers where it is not 1."""
    numbers = [layer.rsplit("_", 1)[-1] for layer in bank.layers]
    if not all(number.isdigit() for number in numbers[:2]) or int(numbers[1]) - int(numbers[0]) == 1:
        return ""
    return f":{int(numbers[1]) - int(numbers[0])}"


def _replaced(path: str, old: str, new: str) -> str:
    return "/".join(new if part == old else part for part in path.split("/"))


def _walk(tree: PyTree, on_mapping: Callable[[Mapping[str, Any]], dict[str, Any]]) -> PyTree:
    if isinstance(tree, Mapping):
        return on_mapping(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_walk(item, on_mapping) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_walk(item, on_mapping) for item in tree)
    return tree


def _slice(leaf: Any, index: int, bank: Bank) -> Any:
    if is_box(leaf):
        return leaf.replace(value=_slice(leaf.value, index, bank), names=tuple(leaf.names[1:]))
    if not leaf.shape or leaf.shape[0] != len(bank.layers):
        raise ValueError(
            f"A leaf of bank {bank.name!r} has shape {leaf.shape}; its first dimension must be its "
            f"{len(bank.layers)} layers."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[index]


def _stacked(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if is_box(first):
        names = ("layers", *first.names)
        return first.replace(value=_stacked(tuple(leaf.value for leaf in leaves)), names=names)
    shapes = {(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves}
    if len(shapes) > 1:
        raise ValueError(f"The layers of one bank must have equal shapes and dtypes. Received: {sorted(shapes)}")
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return np.stack(leaves)
    return jnp.stack(leaves)

"""Where every array of a tree lives on a mesh: `Layout` turns declared dimension names into shardings.

Leaves are Flax boxes that declare logical names, or bare arrays, which split their largest dimension over fsdp. A
layout that would replicate too much, or a mesh that nothing runs on, is refused by name with one that works.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dew.arrays import PyTree
from dew.placement.explain import Explanation, Row, explanation
from dew.placement.memory import shard_bytes
from dew.placement.rules import (
    DEFAULT_RULES,
    LAYERS,
    PARAMETER_AXES,
    STAGE,
    STAGED,
    Refusal,
    Resolution,
    Rule,
    normalized_rules,
    resolve,
    spec_axes,
)
from dew.placement.stacks import StackView, is_box
from dew.tree import closest, map_named, named_leaves

__all__ = ["Layout", "LayoutRefused"]

_NO_STACKS = StackView()


class LayoutRefused(ValueError):  # noqa: N818 - the public name
    """A layout or mesh refused by design; the text names the axis, the reason and one that runs."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rules from logical dimension names to mesh axes, and the limits of what may stay whole.

    Attributes:
        rules: Ordered (name, axes) pairs, or a mapping that updates the defaults.
        min_shard: Leaves with fewer elements stay replicated; a bank counts the elements of one layer, so that
            a scanned model and an unscanned one are placed alike. The layers of a bank split over the stages whatever
            their size: each stage holds its own.
        tolerance: Largest fraction of the elements in matrices of `min_shard` or more that may be replicated; the
            scales and biases of a layer do not count.
        host: State kept in pinned host memory between steps.
        host_parameters: Globs of parameters kept in pinned host memory.

    Raises:
        LayoutRefused: If a field asks for what is not available, or a rule names an unknown axis.
    """

    rules: tuple[Rule, ...] = DEFAULT_RULES
    min_shard: int = 2**16
    tolerance: float = 0.02
    host: tuple[str, ...] = ()
    host_parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "rules", normalized_rules(self.rules))
        except ValueError as error:
            raise LayoutRefused(str(error)) from error
        for name in ("host", "host_parameters"):
            if getattr(self, name):
                raise LayoutRefused(
                    f"Layout {name}={getattr(self, name)!r}: host placement is not available yet; use {name}=()."
                )
            object.__setattr__(self, name, ())
        if isinstance(self.min_shard, bool) or not isinstance(self.min_shard, int) or self.min_shard < 1:
            raise LayoutRefused(f"Layout min_shard is a number of elements, at least 1. Received: {self.min_shard!r}")
        if not 0 <= self.tolerance <= 1:
            raise LayoutRefused(f"Layout tolerance is a fraction from 0 to 1. Received: tolerance={self.tolerance!r}")

    def shardings(self, mesh: Mesh, tree: PyTree) -> PyTree:
        """Choose the sharding of every leaf.

        Args:
            mesh: A mesh with the six axes.
            tree: Variables whose leaves are boxes that declare logical names, arrays or shapes.

        Returns:
            The tree, unboxed, with a NamedSharding per leaf.

        Raises:
            LayoutRefused: If a rule puts a parameter on an axis that cannot hold one.
        """
        return map_named(
            lambda path, leaf: NamedSharding(mesh, self.place(mesh, path, leaf).spec), tree, is_leaf=is_box
        )

    def shardings_like(
        self, mesh: Mesh, tree: PyTree, reference: Mapping[str, tuple[tuple[int, ...], NamedSharding]]
    ) -> PyTree:
        """Give optimizer moments and averages the placement of the parameters they belong to.

        Args:
            mesh: The mesh of leaves that belong to no parameter.
            tree: Optimizer state or an average, as arrays or shapes.
            reference: Parameter path to its shape and sharding.

        Returns:
            The tree with a NamedSharding per leaf: that of the parameter whose path its own path ends in, when
            the shapes agree; replicated otherwise.
        """
        whole = NamedSharding(mesh, PartitionSpec())
        known = {path.removeprefix("params/"): entry for path, entry in reference.items()}
        known.update(reference)

        def like(path: str, leaf: Any) -> NamedSharding:
            parts = path.split("/")
            for start in range(len(parts)):
                entry = known.get("/".join(parts[start:]))
                if entry is not None:
                    shape, sharding = entry
                    return sharding if tuple(shape) == tuple(leaf.shape) else whole
            return whole

        return map_named(like, jax.tree.map(_value, tree, is_leaf=is_box))

    def place(self, mesh: Any, path: str, leaf: Any) -> Resolution:
        """Resolve one leaf, with the reasons for every dimension.

        Args:
            mesh: A mesh with the six axes, or anything with their sizes as `shape`.
            path: The leaf's path, for errors.
            leaf: A box, an array or a shape.

        Returns:
            The resolution; `min_shard` and the legality of axes are applied.

        Raises:
            LayoutRefused: If a rule puts the leaf on an axis that cannot hold a parameter.
        """
        shape = tuple(_value(leaf).shape)
        elements = _elements(leaf)
        if elements < self.min_shard:
            return self._small(mesh, shape, leaf, f"{elements} elements are fewer than min_shard={self.min_shard}")
        if not is_box(leaf):
            return _largest_over_fsdp(shape, mesh)
        resolution = resolve(leaf.names, shape, mesh, self.rules)
        illegal = _illegal_axes(leaf.names, resolution.spec)
        if illegal:
            raise LayoutRefused(
                f"The rules put {path} {shape} on axis {illegal[0]!r} (names {tuple(leaf.names)}), but a parameter "
                f"may only split over {', '.join(PARAMETER_AXES)}, and {' and '.join(STAGED)} over {STAGE}. Point that "
                "rule at one of these or at None."
            )
        return resolution

    def _small(self, mesh: Any, shape: tuple[int, ...], leaf: Any, reason: str) -> Resolution:
        """Place a leaf that is too small to split: a bank's layers go to their stages all the same."""
        names = tuple(name if name == LAYERS else None for name in leaf.names) if is_box(leaf) else (None,) * len(shape)
        found = resolve(names, shape, mesh, [rule for rule in self.rules if rule[0] == LAYERS])
        return dataclasses.replace(found, reasons=tuple(why and reason for why in found.reasons))

    def check(self, mesh: Mesh, tree: PyTree, shardings: PyTree, stacks: StackView = _NO_STACKS) -> None:
        """Refuse a placement that leaves too much of the parameters replicated.

        Args:
            mesh: The mesh of the placement.
            tree: The parameters as boxes, arrays or shapes; boxes also let the error say why.
            shardings: Tree of NamedSharding of the unboxed structure.
            stacks: How banks stand for layers, so that the error gives per-layer paths.

        Raises:
            LayoutRefused: If a rule names a dimension that no parameter declares, or the replicated fraction exceeds
                `tolerance`, naming the five largest leaves.
        """
        if any(map(is_box, jax.tree.leaves(tree, is_leaf=is_box))):
            self.check_rules(tree)
        self._refuse_copied_layers(mesh, tree, shardings)
        split_axes = {axis: mesh.shape[axis] for axis in PARAMETER_AXES if mesh.shape[axis] > 1}
        if not split_axes:
            return
        places = list(named_leaves(shardings).values())
        leaves = named_leaves(tree, is_leaf=is_box)
        large = [
            (path, leaf, sharding)
            for (path, leaf), sharding in zip(leaves.items(), places, strict=True)
            if self._counts(leaf)
        ]
        total = sum(math.prod(_value(leaf).shape) for _, leaf, _ in large)
        whole = [(path, leaf) for path, leaf, sharding in large if not set(spec_axes(sharding.spec)) & set(split_axes)]
        replicated = sum(math.prod(_value(leaf).shape) for _, leaf in whole)
        if total == 0 or replicated / total <= self.tolerance:
            return
        whole.sort(key=lambda item: -math.prod(_value(item[1]).shape))
        axes = ", ".join(f"{axis}={size}" for axis, size in split_axes.items())
        listed = "\n".join(
            f"  {stacks.title(path)} {tuple(_value(leaf).shape)}: {self._why(mesh, path, leaf)}"
            for path, leaf in whole[:5]
        )
        raise LayoutRefused(
            f"On mesh {axes}, {replicated / total:.1%} of the parameters in matrices of min_shard={self.min_shard} "
            f"elements or more stay whole on every device; tolerance={self.tolerance} allows {self.tolerance:.1%}. "
            f"The largest:\n{listed}\n"
            f"{self._advice(mesh, tree)}"
        )

    def _counts(self, leaf: Any) -> bool:
        """Whether a leaf should be split: matrices of `min_shard` elements, not the scales and biases of a layer."""
        return len(_layer_shape(leaf)) > 1 and _elements(leaf) >= self.min_shard

    def check_rules(self, tree: PyTree) -> None:
        """Refuse a rule for a dimension that is in no default rule and in no parameter: most likely a typo.

        Args:
            tree: The variables as a module declares them, in boxes where it names dimensions.

        Raises:
            LayoutRefused: If there is such a rule, naming it and the name that is nearest.
        """
        declared = {
            name for leaf in jax.tree.leaves(tree, is_leaf=is_box) if is_box(leaf) for name in leaf.names if name
        }
        known = declared | {name for name, _ in DEFAULT_RULES}
        for name, _ in self.rules:
            if name in known or name.startswith("activation_"):
                continue
            guess = closest(name, sorted(known))
            hint = f" Did you mean {guess!r}?" if guess else ""
            listed = ", ".join(sorted(declared)) or "none, as a plain Flax module's do"
            raise LayoutRefused(
                f"The layout has a rule for {name!r}, but no parameter declares a dimension of that name; "
                f"they declare {listed}.{hint} Names of activations start with 'activation_'."
            )

    def _refuse_copied_layers(self, mesh: Mesh, tree: PyTree, shardings: PyTree) -> None:
        """Refuse rules under which every stage would hold all layers."""
        stages, places = mesh.shape[STAGE], named_leaves(shardings).values()
        banks = [
            sharding
            for leaf, sharding in zip(jax.tree.leaves(tree, is_leaf=is_box), places, strict=True)
            if is_box(leaf) and LAYERS in leaf.names
        ]
        if stages > 1 and banks and not any(STAGE in spec_axes(sharding.spec) for sharding in banks):
            raise LayoutRefused(
                f"The {stages} stages of a mesh with stage={stages} share out the layers of a bank, but every bank is "
                f"whole on every stage: its layers do not divide by {stages}, or the rules keep them whole. Choose "
                f"stages that divide the layers, leave the rule ('{LAYERS}', '{STAGE}') in the table, or use stage=1."
            )

    def _why(self, mesh: Mesh, path: str, leaf: Any) -> str:
        resolution = self.place(mesh, path, leaf)
        names = leaf.names if is_box(leaf) else (None,) * len(resolution.reasons)
        reasons = [str(refusal) for refusal in resolution.refusals]
        reasons = reasons or [
            reason for name, reason in zip(names, resolution.reasons, strict=True) if reason and name != LAYERS
        ]
        return "; ".join(dict.fromkeys(reasons)) or "its sharding says so"

    def _advice(self, mesh: Mesh, tree: PyTree) -> str:
        """Name a mesh on which nothing large is whole, if one of the same size exists."""
        devices = math.prod(mesh.shape[axis] for axis in PARAMETER_AXES)
        for tensor in _divisors_descending(mesh.shape["tensor"]):
            factors = {"data": 1, "expert": 1, "fsdp": devices // tensor, "tensor": tensor, "sequence": 1, "stage": 1}
            if factors == dict(mesh.shape):
                continue
            shape = _MeshShape(factors)
            large = [(path, leaf) for path, leaf in named_leaves(tree, is_leaf=is_box).items() if self._counts(leaf)]
            if all(spec_axes(self.place(shape, path, leaf).spec) for path, leaf in large):
                named = ", ".join(f"{axis}={size}" for axis, size in factors.items() if size > 1)
                return f"Use MeshSpec({named}), which splits all of them, or add rules for the dimensions above."
        return (
            "Use axis sizes that divide the dimensions above, add rules for them, or accept the copies with a "
            "higher tolerance."
        )

    def explain(
        self, mesh: Mesh, tree: PyTree, stacks: StackView = _NO_STACKS, *, layers: Iterable[str] = ()
    ) -> Explanation:
        """Say where every leaf goes and why, one row per leaf.

        Args:
            mesh: A mesh with the six axes.
            tree: Variables as boxes, arrays or shapes.
            stacks: How banks stand for layers; a bank is one row marked with its number of layers.
            layers: What kinds of layers exchange there and run, which a layout cannot know, as `attention_report` and
                `experts_report` of `dew.nn` say it: a line each, kept for the summary.

        Returns:
            The rows, a summary per axis and the bytes per device.
        """
        rows = []
        for path, leaf in named_leaves(tree, is_leaf=is_box).items():
            resolution = self.place(mesh, path, leaf)
            value = _value(leaf)
            bank = stacks.bank_of(path)
            rows.append(
                Row(
                    path=path,
                    title=stacks.title(path),
                    layers=() if bank is None else bank.layers,
                    logical_paths=stacks.logical_paths(path),
                    names=tuple(leaf.names) if is_box(leaf) else (None,) * len(value.shape),
                    shape=tuple(value.shape),
                    resolution=resolution,
                    bytes_per_device=shard_bytes(value.shape, value.dtype, NamedSharding(mesh, resolution.spec)),
                    total_bytes=shard_bytes(value.shape, value.dtype),
                )
            )
        return explanation(dict(mesh.shape), tuple(rows), tuple(layers))


class _MeshShape:
    """The shape of a mesh without devices: enough to resolve rules."""

    def __init__(self, shape: dict[str, int]) -> None:
        self.shape = shape


def _value(leaf: Any) -> Any:
    return leaf.value if is_box(leaf) else leaf


def _elements(leaf: Any) -> int:
    """Elements of a leaf, of one layer for a bank."""
    return math.prod(_layer_shape(leaf))


def _layer_shape(leaf: Any) -> tuple[int, ...]:
    """Shape of a leaf, of one layer for a bank."""
    shape = tuple(_value(leaf).shape)
    if not is_box(leaf):
        return shape
    return tuple(size for name, size in zip(leaf.names, shape, strict=True) if name != LAYERS)


def _illegal_axes(names: tuple[str | None, ...], spec: PartitionSpec) -> tuple[str, ...]:
    """List the axes that split a leaf and may not."""
    return tuple(
        axis
        for name, entry in zip(names, spec, strict=False)
        for axis in spec_axes(PartitionSpec(entry))
        if axis not in PARAMETER_AXES and not (axis == STAGE and name in STAGED)
    )


def _largest_over_fsdp(shape: tuple[int, ...], mesh: Any) -> Resolution:
    """Place a leaf that declares no names: its largest dimension that fsdp divides."""
    fsdp = mesh.shape["fsdp"]
    candidates = [dim for dim, size in enumerate(shape) if fsdp > 1 and size % fsdp == 0 and size > 0]
    if not candidates:
        refusals: Iterable[Refusal] = ()
        reason = "the leaf declares no dimension names, and fsdp=1"
        if fsdp > 1:
            reason = f"the leaf declares no dimension names, and fsdp={fsdp} divides no dimension"
            refusals = (
                Refusal(dim=dim, name=f"dimension {dim}", size=size, axes=("fsdp",), factor=fsdp)
                for dim, size in enumerate(shape)
            )
        return Resolution(
            spec=PartitionSpec(),
            reasons=(reason,) * len(shape),
            rules=(None,) * len(shape),
            refusals=tuple(refusals),
        )
    split = max(candidates, key=lambda dim: shape[dim])
    dims = range(len(shape))
    return Resolution(
        spec=PartitionSpec(*(None,) * split, "fsdp"),
        reasons=tuple(None if dim == split else f"fsdp is taken by dimension {split}" for dim in dims),
        rules=tuple("largest dimension -> fsdp" if dim == split else None for dim in dims),
    )


def _divisors_descending(count: int) -> list[int]:
    return [divisor for divisor in range(count, 0, -1) if count % divisor == 0]

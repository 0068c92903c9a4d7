"""From the logical names of an array's dimensions to mesh axes: ordered rules, first fit.

Entry point: `resolve`. Modules name dimensions (`embed`, `mlp`, `heads`), the rules say which axes may take them, and
an axis that does not divide a dimension leaves it to the next rule. Tensor rules come first: the split of Megatron-LM
(https://arxiv.org/abs/1909.08053, section 3) is a choice about computation, fsdp stores whatever is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from dew.placement.mesh import AXES
from dew.tree import closest

__all__ = [
    "DEFAULT_RULES",
    "LAYERS",
    "PARAMETER_AXES",
    "STAGE",
    "STAGED",
    "Refusal",
    "Resolution",
    "Rule",
    "normalized_rules",
    "resolve",
    "spec_axes",
]

Rule = tuple[str, str | tuple[str, ...] | None]

PARAMETER_AXES = ("fsdp", "expert", "tensor")
"""The axes a stored parameter may split over."""
LAYERS, STAGE = "layers", "stage"
"""The dimension of a bank that counts layers, and the axis that shares it out."""
STAGED = (LAYERS, "vocab")
"""The dimensions of parameters that may split over stages: layers, and the rows of tables, which all stages use."""

DEFAULT_RULES: tuple[Rule, ...] = (
    ("layers", "stage"),
    ("exp", "expert"),
    ("heads", "tensor"),
    ("kv", "tensor"),
    ("ssm_heads", "tensor"),
    ("ssm_groups", "tensor"),
    ("ssm_state", "tensor"),
    ("mlp", "tensor"),
    ("vocab", ("tensor", "stage")),
    ("vocab", "tensor"),
    ("vocab", "stage"),
    ("latent", "tensor"),
    ("embed", "fsdp"),
    ("mlp", "fsdp"),
    ("vocab", "fsdp"),
    ("latent", "fsdp"),
    ("head_dim", "fsdp"),
    ("ssm_state", "fsdp"),
    ("norm", "fsdp"),
    ("activation_batch", ("data", "expert", "fsdp")),
    ("activation_batch", ("data", "expert")),
    ("activation_batch", "data"),
    ("activation_length", "sequence"),
    ("activation_spread", ("sequence", "stage", "tensor")),
    ("activation_spread", ("sequence", "stage")),
    ("activation_spread", ("sequence", "tensor")),
    ("activation_spread", "sequence"),
    ("activation_heads", "tensor"),
    ("activation_kv", "tensor"),
    ("activation_ssm_heads", "tensor"),
    ("activation_ssm_groups", "tensor"),
    ("activation_mlp", "tensor"),
    ("activation_vocab", "tensor"),
    ("activation_embed", None),
)
"""(logical name, mesh axes) in order of precedence; a repeated name is a fallback, None keeps a dimension whole."""

_NOUNS = {
    "heads": "query heads",
    "kv": "kv heads",
    "ssm_heads": "heads of the scan (keys of a delta net)",
    "ssm_groups": "groups of the scan",
    "activation_heads": "query heads",
    "activation_kv": "kv heads",
    "activation_batch": "rows",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """One rule that could not be used for one dimension.

    Attributes:
        dim: Which dimension, counted from 0.
        name: Its logical name.
        size: Its size.
        axes: The mesh axes the rule asked for, those of size 1 left out.
        factor: The product of their sizes.
        taken_by: The dimension that already holds one of the axes, or None when the factor does not divide the size.
    """

    dim: int
    name: str
    size: int
    axes: tuple[str, ...]
    factor: int
    taken_by: int | None = None

    def __str__(self) -> str:
        axes = "*".join(self.axes)
        if self.taken_by is not None:
            return f"{axes} is taken by dimension {self.taken_by}"
        if self.name in _NOUNS:
            return f"{self.size} {_NOUNS[self.name]} do not divide {axes}={self.factor}"
        return f"{self.name}={self.size} does not divide {axes}={self.factor}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolution:
    """Where the dimensions of one array go, and why.

    Attributes:
        spec: The partition spec, trailing None trimmed.
        reasons: Per dimension, why it is whole; None where it is split.
        rules: Per dimension, the rule that decided (`mlp -> tensor`); None where no rule did.
        refusals: Every rule that was tried and discarded, in order.
    """

    spec: PartitionSpec
    reasons: tuple[str | None, ...]
    rules: tuple[str | None, ...]
    refusals: tuple[Refusal, ...] = ()


def normalized_rules(rules: Iterable[Any] | Mapping[str, Any]) -> tuple[Rule, ...]:
    """Check a rule table and write it as a tuple; a mapping updates the defaults.

    Args:
        rules: Ordered (name, axes) pairs, which replace the defaults, or a mapping from name to axes, which takes the
            place of that name's default rules. Axes are a mesh axis, several used together, or None for whole.

    Returns:
        The rules in order.

    Raises:
        TypeError: If an entry is not a (name, axes) pair.
        ValueError: If a rule names an axis that no mesh has.
    """
    if isinstance(rules, Mapping):
        return _updated_defaults(rules)
    checked = []
    for entry in rules:
        if (
            not isinstance(entry, Sequence)
            or isinstance(entry, str)
            or len(entry) != 2
            or not isinstance(entry[0], str)
        ):
            raise TypeError(f"A rule is a pair (logical name, axes), such as ('mlp', 'tensor'). Received: {entry!r}")
        checked.append((entry[0], _checked_axes(entry[0], entry[1])))
    return tuple(checked)


def _updated_defaults(changes: Mapping[str, Any]) -> tuple[Rule, ...]:
    pending = dict(normalized_rules(list(changes.items())))
    updated: list[Rule] = []
    for name, axes in DEFAULT_RULES:
        if name not in changes:
            updated.append((name, axes))
        elif name in pending:
            updated.append((name, pending.pop(name)))
    return (*updated, *pending.items())


def _checked_axes(name: str, axes: Any) -> str | tuple[str, ...] | None:
    if axes is None:
        return None
    if not isinstance(axes, str | Sequence):
        raise TypeError(f"The rule for {name!r} must name mesh axes, or be None for whole. Received: {axes!r}")
    several = (axes,) if isinstance(axes, str) else tuple(axes)
    for axis in several:
        if axis not in AXES:
            guess = closest(str(axis), AXES)
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise ValueError(f"The rule for {name!r} names mesh axis {axis!r}; the axes are {', '.join(AXES)}.{hint}")
    if len(set(several)) != len(several) or not several:
        raise ValueError(f"The rule for {name!r} must name each axis once, or be None for whole. Received: {axes!r}")
    return axes if isinstance(axes, str) else several


def resolve(
    names: Sequence[str | None], shape: Sequence[int], mesh: Any, rules: Iterable[Rule] = DEFAULT_RULES
) -> Resolution:
    """Choose mesh axes for each dimension of one array.

    Rules are tried in order. A rule takes its dimension when the dimension is still undecided, none of its axes is used
    by another dimension of this array, and the axes' product divides the dimension. Axes of size 1, and axes that
    are manual inside a shard_map, count as absent.

    Args:
        names: Logical name of each dimension; None for a dimension without one, which stays whole.
        shape: Size of each dimension.
        mesh: A concrete or abstract mesh.
        rules: (name, axes) pairs in order of precedence.

    Returns:
        The partition spec with the reason for every dimension that stays whole.

    Raises:
        ValueError: If names and shape differ in length, a name repeats, or a rule names an axis the mesh lacks.
    """
    names, shape = tuple(names), tuple(shape)
    named = [name for name in names if name is not None]
    if len(names) != len(shape):
        raise ValueError(f"Dimension names {names} do not match shape {shape}: give one name, or None, per dimension.")
    if len(set(named)) != len(named):
        raise ValueError(f"Dimension names {names} repeat a name, so a rule for it is ambiguous. Use distinct names.")
    manual = set(getattr(mesh, "manual_axes", ()))
    chosen: dict[int, tuple[str, ...]] = {}
    deciding: dict[int, str] = {}
    refusals: list[Refusal] = []
    for name, axes in rules:
        wanted = _usable_axes(name, axes, mesh, manual)
        if name not in names or (dim := names.index(name)) in deciding:
            continue
        if axes is None:
            deciding[dim] = f"{name} -> whole"
            continue
        if not wanted:
            continue
        factor = math.prod(mesh.shape[axis] for axis in wanted)
        holder = next((other for other, used in chosen.items() if set(used) & set(wanted)), None)
        if holder is not None or shape[dim] % factor:
            refusal = Refusal(dim=dim, name=name, size=shape[dim], axes=wanted, factor=factor, taken_by=holder)
            refusals += [] if refusal in refusals else [refusal]
            continue
        chosen[dim] = wanted
        deciding[dim] = f"{name} -> {'*'.join(wanted)}"
    entries = [chosen.get(dim) for dim in range(len(shape))]
    return Resolution(
        spec=_partition_spec(entries),
        reasons=tuple(_reason(dim, names, chosen, deciding, refusals) for dim in range(len(shape))),
        rules=tuple(deciding.get(dim) for dim in range(len(shape))),
        refusals=tuple(refusals),
    )


def _usable_axes(name: str, axes: Any, mesh: Any, manual: set[str]) -> tuple[str, ...]:
    several = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    for axis in several:
        if axis not in mesh.shape:
            raise ValueError(
                f"The rule for {name!r} names axis {axis!r}, which the mesh {tuple(mesh.shape)} lacks. "
                "Build the mesh with dew.placement.build_mesh or change the rule."
            )
    return tuple(axis for axis in several if mesh.shape[axis] > 1 and axis not in manual)


def _partition_spec(entries: list[tuple[str, ...] | None]) -> PartitionSpec:
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*(axes[0] if axes is not None and len(axes) == 1 else axes for axes in entries))


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """List the mesh axes a partition spec uses, in the order of its dimensions.

    Args:
        spec: A partition spec.
    """
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec if entry is not None]
    return tuple(axis for entry in entries for axis in entry)


def _reason(
    dim: int,
    names: tuple[str | None, ...],
    chosen: Mapping[int, tuple[str, ...]],
    deciding: Mapping[int, str],
    refusals: Sequence[Refusal],
) -> str | None:
    if dim in chosen:
        return None
    name = names[dim]
    if name is None:
        return "the dimension has no logical name"
    refused = [str(refusal) for refusal in refusals if refusal.dim == dim]
    if refused:
        return "; ".join(refused)
    if dim in deciding:
        return f"a rule keeps {name!r} whole"
    return f"no rule puts {name!r} on an axis larger than 1"

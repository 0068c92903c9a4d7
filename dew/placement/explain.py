"""A placement in words: one row per leaf, one summary per axis, bytes per device.

Built by `Layout.explain`; print `Explanation.table()` or `Explanation.summary()`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from dew.placement.memory import format_bytes
from dew.placement.mesh import BATCH_AXES
from dew.placement.rules import LAYERS, PARAMETER_AXES, STAGE, Refusal, Resolution, spec_axes

__all__ = ["AxisSummary", "Explanation", "Row", "explanation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One stored leaf.

    Attributes:
        path: Its physical path.
        title: The path as people read it, `params/layers_0..29/mlp/up_proj/kernel`.
        layers: The layers its bank holds; empty outside every bank.
        logical_paths: The per-layer paths it stands for.
        names: Logical name per dimension of the stored leaf.
        shape: Its stored shape; a bank's has the layers first.
        resolution: Spec, rules and reasons.
        bytes_per_device: Bytes each device holds.
        total_bytes: Bytes of the whole leaf.
    """

    path: str
    title: str
    layers: tuple[str, ...]
    logical_paths: tuple[str, ...]
    names: tuple[str | None, ...]
    shape: tuple[int, ...]
    resolution: Resolution
    bytes_per_device: int
    total_bytes: int

    @property
    def spec(self) -> str:
        """The partition spec, one entry per dimension of one layer."""
        entries = [*self.resolution.spec, *[None] * (len(self.shape) - len(self.resolution.spec))]
        if self.layers:
            entries = entries[1:]
        words = ["*".join(entry) if isinstance(entry, tuple) else str(entry or "-") for entry in entries]
        return f"({', '.join(words)})"

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes the leaf splits over."""
        return spec_axes(self.resolution.spec)

    @property
    def rule(self) -> str:
        """The rules that split it, or a dash."""
        return ", ".join(rule for rule in self.resolution.rules if rule and not rule.endswith("whole")) or "-"

    @property
    def why(self) -> str:
        """Why the leaf is not split further: the rules that did not fit, or why none of it is split."""
        refused = [str(refusal) for refusal in self.resolution.refusals if refusal.taken_by is None]
        if not refused and not self.axes:
            named = zip(self.names, self.resolution.reasons, strict=True)
            refused = [reason for name, reason in named if reason and name != LAYERS]
        return "; ".join(dict.fromkeys(refused))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisSummary:
    """What one mesh axis does to the tree.

    Attributes:
        axis: The axis.
        size: Its size.
        splits: Kinds of weights that it splits, `mlp/gate_proj/kernel`.
        whole: Kinds of weights that stay whole on it.
        reasons: Why, in words; one line per group of dimensions that do not divide.
    """

    axis: str
    size: int
    splits: tuple[str, ...]
    whole: tuple[str, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        if self.axis not in (*PARAMETER_AXES, STAGE):
            return f"{self.axis}={self.size} splits batch rows; parameters are copied"
        rows = " and batch rows" if self.axis in BATCH_AXES else ""
        text = f"{self.axis}={self.size} splits {', '.join(self.splits) or 'no parameter'}{rows}"
        if self.whole:
            text += f"; whole: {', '.join(self.whole)}"
        return "\n  ".join([text, *self.reasons])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """A placement in words.

    Attributes:
        mesh_shape: Axis to size.
        rows: One per stored leaf.
        axes: One summary per axis larger than 1.
        layers: What kinds of layers exchange on the mesh, and which kernel they run.
    """

    mesh_shape: Mapping[str, int]
    rows: tuple[Row, ...]
    axes: tuple[AxisSummary, ...]
    layers: tuple[str, ...] = ()

    @property
    def bytes_per_device(self) -> int:
        """Bytes each device holds of the tree."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole tree."""
        return sum(row.total_bytes for row in self.rows)

    def table(self) -> str:
        """Lay the rows out as text: path, shape, spec, rule, bytes per device, why it is not split further."""
        header = ("leaf", "shape", "spec", "rule", "per device", "why not further")
        cells = [header]
        for row in self.rows:
            count = f" x{len(row.layers)}" if len(row.layers) > 1 else ""
            shape = "x".join(str(size) for size in (row.shape[1:] if row.layers else row.shape))
            cells.append((row.title + count, shape, row.spec, row.rule, format_bytes(row.bytes_per_device), row.why))
        widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        return "\n".join(lines)

    def summary(self) -> str:
        """Say for each axis what it splits, what stays whole and why, then what layers run, then bytes per device."""
        lines = [str(axis) for axis in self.axes] or ["one device holds everything"]
        lines.extend(self.layers)
        lines.append(f"{format_bytes(self.bytes_per_device)} per device of {format_bytes(self.total_bytes)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary()}"


def explanation(mesh_shape: Mapping[str, int], rows: tuple[Row, ...], layers: tuple[str, ...] = ()) -> Explanation:
    """Summarise rows per axis.

    Args:
        mesh_shape: Axis to size.
        rows: The leaves.
        layers: Lines about kinds of layers.

    Returns:
        The explanation.
    """
    axes = tuple(_summary(axis, size, rows) for axis, size in mesh_shape.items() if size > 1)
    return Explanation(mesh_shape=mesh_shape, rows=rows, axes=axes, layers=layers)


def _summary(axis: str, size: int, rows: tuple[Row, ...]) -> AxisSummary:
    splits = _kinds(row for row in rows if axis in row.axes)
    whole = [kind for kind in _kinds(row for row in rows if axis not in row.axes) if kind not in splits]
    return AxisSummary(
        axis=axis, size=size, splits=tuple(splits), whole=tuple(whole), reasons=tuple(_reasons(axis, size, rows))
    )


def _kinds(rows: Iterable[Row]) -> list[str]:
    """Name weights without their collection and layer, once each: `self_attn`, `mlp`, `embed_tokens`."""
    kinds = []
    for row in rows:
        parts = row.path.split("/")[1:] or [row.path]
        if row.layers or parts[0].startswith("layers_"):
            parts = parts[1:] or parts
        kinds.append(parts[0])
    return list(dict.fromkeys(kinds))


def _reasons(axis: str, size: int, rows: tuple[Row, ...]) -> list[str]:
    refused: dict[tuple[str, int], Refusal] = {}
    sizes: dict[str, int] = {}
    for row in rows:
        for name, extent in zip(row.names, row.shape, strict=True):
            if name is not None:
                sizes.setdefault(name, extent)
        for refusal in row.resolution.refusals:
            if axis in refusal.axes and refusal.taken_by is None and axis not in row.axes:
                refused.setdefault((refusal.name, refusal.size), refusal)
    names = {name for name, _ in refused}
    lines = []
    if "kv" in names and "heads" in names:
        lines.append(
            f"{sizes['heads']} query heads / {sizes['kv']} kv heads do not divide {axis}={size}: attention stays whole"
        )
    elif "kv" in names:
        lines.append(f"{sizes['kv']} kv heads do not divide {axis}={size}: keys and values stay whole, queries split")
    elif "heads" in names:
        lines.append(f"{sizes['heads']} query heads do not divide {axis}={size}: queries and their output stay whole")
    for (name, _), refusal in refused.items():
        if name == "ssm_heads":
            lines.append(f"{refusal}: every device scans them all; a {axis} axis that divides them splits the layer")
        elif name not in ("heads", "kv"):
            lines.append(str(refusal))
    small = [row for row in rows if any("min_shard" in (reason or "") for reason in row.resolution.reasons)]
    if small and axis in PARAMETER_AXES:
        limit = next(reason for reason in small[0].resolution.reasons if reason).partition("fewer than ")[2]
        listed = ", ".join(row.title for row in small[:3]) + (", ..." if len(small) > 3 else "")
        lines.append(f"fewer elements than {limit}, so whole: {len(small)} leaves ({listed})")
    return lines

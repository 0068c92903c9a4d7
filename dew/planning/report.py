"""An estimate in words: what a device holds to generate and to train, and whether that fits.

Entry point: `plan_text`.
"""

from __future__ import annotations

import math

from dew.placement.memory import format_bytes
from dew.planning.estimate import Estimate

__all__ = ["plan_text"]


def plan_text(estimate: Estimate, *, device_bytes: float | None = None, table: bool = False) -> str:
    """Write an estimate for people.

    Args:
        estimate: What `estimate_bytes` found.
        device_bytes: Memory of one device in bytes; None leaves out whether it fits.
        table: Whether to list every leaf.

    Returns:
        Several lines of text.
    """
    axes = ", ".join(f"{axis}={size}" for axis, size in estimate.mesh_shape.items() if size > 1) or "one device"
    devices = math.prod(estimate.mesh_shape.values())
    decode_axes = ", ".join(f"{axis}={size}" for axis, size in estimate.decode_shape.items() if size > 1)
    where = "" if estimate.decode_shape == estimate.mesh_shape else f" on {decode_axes}"
    cache = f"{estimate.rows} rows x {estimate.slots} tokens"
    lines = [
        f"{estimate.num_parameters:,} parameters on {devices} devices ({axes}); bytes per device:",
        "",
        *_block(
            f"to generate{where}", [("weights", estimate.weights), (f"cache ({cache})", estimate.cache)], device_bytes
        ),
        *_block(
            "to train",
            [
                ("weights", estimate.masters),
                ("gradients", estimate.gradients),
                ("optimizer state", estimate.optimizer_state),
                *([("whole token tables (1f1b)", estimate.tables)] if estimate.tables else []),
            ],
            device_bytes,
        ),
        "Activations and the compiler's temporaries come on top; they depend on the batch.",
        "",
        *(f"{line}\n" for line in estimate.explanation.layers),
        *([estimate.explanation.table(), ""] if table else []),
        *(str(axis) for axis in estimate.explanation.axes),
    ]
    if estimate.refusal is not None:
        lines += ["", f"Refused: {estimate.refusal}"]
    return "\n".join(lines)


def _block(title: str, parts: list[tuple[str, int]], device_bytes: float | None) -> list[str]:
    total = sum(size for _, size in parts)
    verdict = ""
    if device_bytes is not None:
        verdict = f"  {'fits in' if total <= device_bytes else 'does not fit in'} {format_bytes(device_bytes)}"
    width = max(len(name) for name, _ in [*parts, (title, 0)])
    return [
        f"{title.ljust(width)}  {format_bytes(total):>12}{verdict}",
        *(f"  {name.ljust(width)}{format_bytes(size):>12}" for name, size in parts),
        "",
    ]

"""What a model is and where it lives, in words: `summary_text`."""

from __future__ import annotations

import math
from typing import Any

from flax import linen as nn

from dew.inference.decode_mesh import decode_mesh, decode_place
from dew.nn.attention_report import attention_report, cache_report
from dew.nn.experts_report import experts_report
from dew.placement.layout import LayoutRefused
from dew.placement.memory import format_bytes
from dew.placement.mesh import BATCH_AXES
from dew.placement.stacks import is_box
from dew.tree import named_leaves
from dew_keras.engine import Engine

MOMENTS = "masters and optimizer state are made at the first fit"


def summary_text(engine: Engine, name: str, *, with_leaves: bool = False) -> str:
    """Describe a model: parameters, then for each mesh axis what it splits, what stays whole, and bytes per device.

    Args:
        engine: The model's engine.
        name: What to call it.
        with_leaves: Whether to list every weight with its shape, spec, rule and bytes.

    Returns:
        The lines.
    """
    module = engine.module
    lines = [f'Model: "{name}" ({type(module).__name__})']
    if not engine.is_built and not engine.is_language_model:
        lines.append("Total params: 0 (shapes follow from the data of the first fit, evaluate or predict)")
        return "\n".join(lines)
    tree = engine.abstract_variables() if engine.is_language_model else engine.variables
    if engine.is_language_model:
        lines.append(
            f"{len(module.layers)} layers, width {module.features}, vocabulary {module.vocab_size}, "
            f"context {module.max_length}, computes in {module.dtype}"
        )
    explained = engine.layout.explain(engine.mesh, tree, engine.view, layers=_layers(engine))
    counts = {"params": 0, "other": 0}
    for path, leaf in named_leaves(tree, is_leaf=is_box).items():
        shape = (leaf.value if is_box(leaf) else leaf).shape
        counts["params" if path.startswith("params/") else "other"] += math.prod(shape)
    total = sum(counts.values())
    lines.append(f"Total params: {total:,} ({format_bytes(explained.total_bytes)})")
    lines.append(f"Trainable params: {counts['params']:,}")
    lines.append(f"Non-trainable params: {counts['other']:,}")
    lines.append(f"Mesh: {_mesh_text(engine)}")
    lines.append(explained.summary())
    lines.append(f"Weights: {_where(engine)}")
    if engine.is_language_model:
        lines.extend(_generating(engine, tree, explained.bytes_per_device))
    if with_leaves:
        lines.append(explained.table())
    return "\n".join(lines)


def _layers(engine: Engine) -> list[str]:
    """Say what the layers exchange and run on the mesh, and what decoding keeps of them."""
    if not engine.is_language_model:
        return []
    module, mesh = engine.module, engine.mesh
    rows: dict[str, Any] = {
        "num_tokens": _row_length(engine),
        "rows": math.prod(mesh.shape[axis] for axis in BATCH_AXES),
    }
    with nn.logical_axis_rules(engine.layout.rules):
        return [
            *attention_report(module, mesh=mesh, **rows),
            *cache_report(module, mesh=decode_mesh(mesh)),
            *experts_report(module, mesh=mesh, **rows, microbatches=engine.microbatches),
        ]


def _generating(engine: Engine, tree: Any, held: int) -> list[str]:
    """Say on which mesh a model generates whose own has axes that decoding cannot use, and what devices hold there."""
    try:
        place = decode_place(engine.mesh, engine.layout, tree, engine.view)
    except LayoutRefused as refusal:
        return [f"Generates on no mesh of itself: {refusal}"]
    if place.mesh is engine.mesh:
        return []
    sizes = f"{format_bytes(place.bytes)} of weights per device"
    more = f", more than the {format_bytes(held)} of training" if place.bytes > held else ""
    return [f"Generates on {_factors(place.mesh)}: {sizes}{more}"]


def _mesh_text(engine: Engine) -> str:
    used = _factors(engine.mesh)
    return f"{engine.mesh.size} devices" + (f" as {used}" if used else "")


def _factors(mesh: Any) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)


def _where(engine: Engine) -> str:
    if engine.current is not None:
        return "on the mesh, with masters and optimizer state"
    if engine.variables is not None:
        return f"on the mesh; {MOMENTS}"
    source = engine.preset.described.source if engine.is_pretrained and engine.preset is not None else "random values"
    return f"not on devices yet, from {source} when compile, generate or fit needs them; {MOMENTS}"


def _row_length(engine: Engine) -> int | None:
    """Length of rows made from texts, where `compile` says it."""
    return None if engine.compiled is None else engine.compiled.sequence_length

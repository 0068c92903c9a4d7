"""What a model is and where it lives, in words: `summary_text`."""

from __future__ import annotations

import math

from dew.nn.attention_report import attention_report
from dew.placement.memory import format_bytes
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
    explained = engine.layout.explain(engine.mesh, tree, engine.view)
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
        lines.extend(attention_report(module, mesh=engine.mesh))
    if with_leaves:
        lines.append(explained.table())
    return "\n".join(lines)


def _mesh_text(engine: Engine) -> str:
    shape = dict(engine.mesh.shape)
    used = ", ".join(f"{axis}={size}" for axis, size in shape.items() if size > 1)
    return f"{math.prod(shape.values())} devices" + (f" as {used}" if used else "")


def _where(engine: Engine) -> str:
    if engine.current is not None:
        return "on the mesh, with masters and optimizer state"
    if engine.variables is not None:
        return f"on the mesh; {MOMENTS}"
    source = engine.preset.described.source if engine.is_pretrained and engine.preset is not None else "random values"
    return f"not on devices yet, from {source} when compile, generate or fit needs them; {MOMENTS}"

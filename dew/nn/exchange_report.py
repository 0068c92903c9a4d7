"""How each layer's attention would be exchanged on a mesh that splits positions, in words, and which lengths it takes.

Entry points: `exchange_report`, `check_row_length`.
"""

import collections
from collections.abc import Iterator
from typing import Any

from dew.kernels.attention_choice import Accelerator
from dew.nn.attention import AttentionSpec
from dew.parallel.choice import Choice, choose_exchange, skips_window
from dew.parallel.exchange import AXIS, placed_sizes
from dew.placement.layout import LayoutRefused


def exchange_report(
    module: Any,
    *,
    mesh: Any,
    num_tokens: int | None = None,
    rows: int = 1,
    packed: bool = False,
    device: Accelerator | None = None,
) -> list[str]:
    """Say for each kind of attention layer which exchange its rows take, what it sends, and why not another.

    Args:
        module: A `CausalTransformer`.
        mesh: A concrete or planned mesh.
        num_tokens: Length of the rows; None takes the model's longest context.
        rows: Rows of the global batch.
        packed: Whether rows hold several documents or padding.
        device: The device; None means the one that programs run on by default.

    Returns:
        A line per kind of layer; none where the mesh does not split positions.
    """
    length = module.max_length if num_tokens is None else num_tokens
    lines: dict[str, int] = {}
    for spec, count in _kinds(module, mesh):
        limits = "".join(f", {name} {size}" for name, size in (("window", spec.window), ("chunk", spec.chunk)) if size)
        try:
            chosen = str(_choice(module, spec, mesh, rows, length, packed, device))
        except (LayoutRefused, ValueError) as refusal:
            chosen = f"refused: {refusal}"
        text = f"of {length} tokens{limits}{' in documents' if packed else ''}: {chosen}"
        lines[text] = lines.get(text, 0) + count
    return [f"exchange of {count} layer{'s' if count > 1 else ''} {text}" for text, count in lines.items()]


def check_row_length(module: Any, mesh: Any, num_tokens: int) -> None:
    """Refuse rows that some layer could not attend on a mesh, before anything is made.

    Args:
        module: A `CausalTransformer`, or any other module: those without layers are not checked.
        mesh: A concrete or planned mesh.
        num_tokens: Positions of a row.

    Raises:
        LayoutRefused: If a layer cannot be exchanged; the text names lengths that can.
    """
    for spec, _ in _kinds(module, mesh):
        _choice(module, spec, mesh, 1, num_tokens, packed=True, device=None)


def _kinds(module: Any, mesh: Any) -> Iterator[tuple[AttentionSpec, int]]:
    """Count the layers of each kind; none where no positions are split."""
    if mesh.shape.get(AXIS, 1) > 1:
        mixers = [layer.mixer for layer in getattr(module, "layers", ())]
        yield from collections.Counter(spec for spec in mixers if isinstance(spec, AttentionSpec)).items()


def _choice(
    module: Any, spec: AttentionSpec, mesh: Any, rows: int, length: int, packed: bool, device: Accelerator | None
) -> Choice:
    window, chunk = spec.window, spec.chunk
    if packed and chunk is not None:
        # As `dew.nn.masks.limited` has it: blocks of documents are documents, and none is longer.
        window, chunk = chunk if window is None else min(window, chunk), None
    sizes = placed_sizes(
        mesh,
        (rows, length, spec.num_heads, spec.head_dim),
        spec.num_kv_heads,
        module.dtype,
        is_masked=packed,
        has_sinks=spec.sinks,
        has_softcap=spec.softcap is not None,
        window=window,
        chunk=chunk,
    )
    skips = skips_window(sizes, module.attention_impl, device)
    return choose_exchange(sizes, module.sequence_impl, kernel_skips_window=skips)

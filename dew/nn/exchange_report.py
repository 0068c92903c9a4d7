"""How each kind of layer exchanges what it needs on a mesh that splits positions, in words, and which lengths it takes.

Entry points: `exchange_report`, `check_row_length`, `takes_row_length`.
"""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dew.kernels.attention_choice import Accelerator
from dew.nn.attention import AttentionSpec
from dew.nn.latent_attention import attention_form
from dew.nn.scan_mixer import ScanSpec
from dew.parallel.choice import choose_exchange, exchange_refusal
from dew.parallel.exchange import AXIS, placed_sizes
from dew.parallel.row_lengths import length_advice
from dew.parallel.scan_slices import ScanPlaces, Streams, shift_bytes
from dew.parallel.traffic import AttentionSizes
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
    """Say for each kind of layer which exchange its rows take, what it sends, why not another, and the kernel inside.

    Args:
        module: A `CausalTransformer`.
        mesh: A concrete or planned mesh.
        num_tokens: Length of the rows; None takes the model's longest context.
        rows: Rows of the global batch.
        packed: Whether rows hold several documents or padding.
        device: The device; None means the one that programs run on by default.

    Returns:
        A line per kind of layer that reads other positions; none where the mesh does not split positions.
    """
    length = module.max_length if num_tokens is None else num_tokens
    lines: dict[str, int] = {}
    for spec, count in _kinds(module, mesh):
        limits = [(name, getattr(spec, name, None)) for name in ("window", "chunk")]
        where = "".join(f", {name} {size}" for name, size in limits if size) + (" in documents" if packed else "")
        try:
            if isinstance(spec, AttentionSpec):
                sizes = _sizes(module, spec, mesh, rows, length, packed)
                named = {"implementation": module.attention_impl, "device": device}
                chosen = str(choose_exchange(sizes, module.sequence_impl, **named))
            else:
                chosen = _shifts(module, spec, mesh, rows, length)
        except LayoutRefused as refusal:
            chosen = f"refused: {refusal}"
        text = f"of {length} tokens{where}: {chosen}"
        lines[text] = lines.get(text, 0) + count
    return [f"exchange of {count} layer{'s' if count > 1 else ''} {text}" for text, count in lines.items()]


def check_row_length(module: Any, mesh: Any, num_tokens: int, *, packed: bool | None = None) -> None:
    """Refuse rows that some layer could not compute on a mesh, before anything is made.

    Args:
        module: A `CausalTransformer`, or any other module: those without layers are not checked.
        mesh: A concrete or planned mesh.
        num_tokens: Positions of a row.
        packed: Whether rows hold several documents or padding; None refuses what can run neither with nor without.

    Raises:
        LayoutRefused: If a layer cannot be exchanged; the text gives lengths that every layer takes.
    """
    refusal = _refusal(module, mesh, num_tokens, packed)
    if refusal is None:
        return
    rows = length_advice(
        num_tokens,
        lambda length: _refusal(module, mesh, length, packed) is None,
        step=mesh.shape[AXIS],
        largest=module.max_length,
    )
    where = f"sequence={mesh.shape[AXIS]}"
    raise LayoutRefused(
        f"{refusal} {f'Use {rows}.' if rows else f'No row within the context of {module.max_length} fits {where}.'}"
    )


def takes_row_length(module: Any, mesh: Any, num_tokens: int, *, packed: bool | None = None) -> bool:
    """Say whether `check_row_length` accepts a length."""
    return _refusal(module, mesh, num_tokens, packed) is None


def _refusal(module: Any, mesh: Any, length: int, packed: bool | None) -> str | None:
    """Say why some layer cannot compute rows of a length, without what works instead."""
    if packed is None:
        refusals = [_refusal(module, mesh, length, each) for each in (True, False)]
        return refusals[0] if all(refusals) else None
    for spec, _ in _kinds(module, mesh):
        if isinstance(spec, AttentionSpec):
            sizes = _sizes(module, spec, mesh, 1, length, packed)
            refusal = exchange_refusal(sizes, module.sequence_impl, implementation=module.attention_impl)
        else:
            refusal = spec.row_length_refusal(length, mesh.shape[AXIS])
        if refusal is not None:
            return refusal
    return None


def _kinds(module: Any, mesh: Any) -> Iterator[tuple[Any, int]]:
    """Count the layers of each kind; none where no positions are split."""
    if mesh.shape.get(AXIS, 1) > 1:
        mixers = [layer.mixer for layer in getattr(module, "layers", ())]
        known = [spec if isinstance(spec, ScanSpec) else attention_form(spec) for spec in mixers]
        yield from collections.Counter(spec for spec in known if spec is not None).items()


def _sizes(module: Any, spec: AttentionSpec, mesh: Any, rows: int, length: int, packed: bool) -> AttentionSizes:
    window, chunk = spec.window, spec.chunk
    if packed and chunk is not None:
        # As `dew.nn.masks.limited` has it: blocks of documents are documents, and none is longer.
        window, chunk = chunk if window is None else min(window, chunk), None
    return placed_sizes(
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


def _shifts(module: Any, spec: Any, mesh: Any, rows: int, length: int) -> str:
    """Say what a scan sends over the sequence axis."""
    kept, dtype = spec.cache_shape, jnp.dtype(module.dtype)
    dims = ((kept.num_heads, kept.head_dim), *[(kept.num_groups, kept.state_size)] * 2)
    streams = Streams(*(jax.ShapeDtypeStruct((rows, length, *channels), dtype) for channels in dims))
    places = ScanPlaces(mesh, streams, spec.conv_kernel, splits_length=True)
    count, sent = shift_bytes(
        places.slices,
        rows=rows // places.parts(places.tokens[0]),
        heads=kept.num_heads // places.parts(places.channels.x),
        head_dim=kept.head_dim,
        groups=kept.num_groups // places.parts(places.channels.b),
        state_size=kept.state_size,
        taps=spec.conv_kernel,
        itemsize=dtype.itemsize,
        transition=spec.transition_size,
    )
    return (
        f"{2 * count} shifts, {2 * sent:,} bytes a device (the convolution's reach, and states with their transitions)"
    )

"""How each kind of layer exchanges what it needs on a mesh that splits positions, in words, and which lengths it takes.

Entry points: `exchange_report`, `check_row_length`, `takes_row_length`; `layer_lines` writes any report of layers.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from dew.kernels.attention_choice import Accelerator, accelerator
from dew.nn.attention import AttentionSpec
from dew.nn.latent_attention import attention_form
from dew.nn.masks import layer_limits
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
    packed: bool | None = None,
    device: Accelerator | None = None,
) -> list[str]:
    """Say for each kind of layer which exchange its rows take, what it sends, why not another, and the kernel inside.

    Told of training: a kernel that does not drop probabilities may still evaluate.

    Args:
        module: A `CausalTransformer`.
        mesh: A concrete or planned mesh.
        num_tokens: Length of the rows; None takes the model's longest context.
        rows: Rows of the global batch.
        packed: As `layer_lines`'.
        device: The device; None takes the mesh's, or the default.

    Returns:
        The lines of the layers that read other positions; none where the mesh does not split positions.
    """
    length = module.max_length if num_tokens is None else num_tokens
    device = accelerator(mesh) if device is None else device

    def describe(spec: Any, in_documents: bool) -> str:
        try:
            refusal = _layer_refusal(module, spec, mesh, length, in_documents, device)
            if refusal is not None:
                return f"refused: {refusal} {_ways_out(module, mesh, length, in_documents, device)}"
            if not isinstance(spec, AttentionSpec):
                return _shifts(module, spec, mesh, rows, length)
            sizes = _sizes(module, spec, mesh, rows, length, in_documents)
            return str(
                choose_exchange(sizes, module.sequence_impl, implementation=module.attention_impl, device=device)
            )
        except LayoutRefused as error:
            return f"refused: {error}"

    return layer_lines(f"of {length} tokens", "exchange", _kinds(module, mesh), describe, packed=packed)


def layer_lines(
    rows: str,
    what: str,
    kinds: Iterable[tuple[Any, int]],
    describe: Callable[[Any, bool], str],
    *,
    packed: bool | None,
    dtype: str = "",
) -> list[str]:
    """Write what kinds of layers do with rows.

    Args:
        rows: The rows, in words.
        what: What is told of the layers.
        kinds: Specs, and how many layers have each.
        describe: Says it of a spec, for rows with documents or padding and for others.
        packed: Whether rows hold documents or padding, as those made from texts do; None tells both.
        dtype: Compute dtype, where that is part of it.

    Returns:
        A line per kind of layer; two where both are told and are not the same.
    """
    lines: collections.Counter[str] = collections.Counter()
    for spec, count in kinds:
        limits = [f", {name} {size}" for name in ("window", "chunk") if (size := getattr(spec, name, None)) is not None]
        found = {each: describe(spec, each) for each in ((False, True) if packed is None else (packed,))}
        if packed is None and found[False] == found[True]:
            del found[True]
        for in_documents, text in found.items():
            documents = " in documents or padded" if in_documents else ""
            lines[f"{rows}{''.join(limits)}{documents}{dtype}: {text}"] += count
    return [f"{what} of {count} layer{'s' if count > 1 else ''} {text}" for text, count in lines.items()]


def check_row_length(
    module: Any,
    mesh: Any,
    num_tokens: int,
    *,
    packed: bool | None = None,
    train: bool = True,
    device: Accelerator | None = None,
) -> None:
    """Refuse rows that some layer could not compute on a mesh, before anything is made.

    Args:
        module: A `CausalTransformer`, or any other module: those without layers are not checked.
        mesh: A concrete or planned mesh.
        num_tokens: Positions of a row.
        packed: Whether rows hold several documents or padding; None refuses what can run neither with nor without.
        train: Whether they are trained on; nothing else drops probabilities, which some kernels do not.
        device: The device; None takes the mesh's, or the default.

    Raises:
        LayoutRefused: If a layer cannot be exchanged; the text gives what every layer takes, lengths or a smaller axis.
    """
    module = _as_called(module, train)
    refusal = _refusal(module, mesh, num_tokens, packed, device)
    if refusal is not None:
        raise LayoutRefused(f"{refusal} {_ways_out(module, mesh, num_tokens, packed, device)}")


def takes_row_length(
    module: Any, mesh: Any, num_tokens: int, *, packed: bool | None = None, train: bool = True
) -> bool:
    """Say whether `check_row_length` accepts a length."""
    return _refusal(_as_called(module, train), mesh, num_tokens, packed, None) is None


def _as_called(module: Any, train: bool) -> Any:
    """Give a module with the dropout of probabilities that a call of it has."""
    drops = getattr(module, "attention_dropout_rate", 0.0) > 0
    return module.clone(attention_dropout_rate=0.0) if drops and not train else module


def _refusal(module: Any, mesh: Any, length: int, packed: bool | None, device: Accelerator | None) -> str | None:
    """Say why some layer cannot compute rows of a length, without what works instead."""
    if packed is None:
        refusals = [_refusal(module, mesh, length, each, device) for each in (True, False)]
        return refusals[0] if all(refusals) else None
    found = (_layer_refusal(module, spec, mesh, length, packed, device) for spec, _ in _kinds(module, mesh))
    return next((refusal for refusal in found if refusal is not None), None)


def _layer_refusal(
    module: Any, spec: Any, mesh: Any, length: int, packed: bool, device: Accelerator | None
) -> str | None:
    if not isinstance(spec, AttentionSpec):
        return spec.row_length_refusal(length, mesh.shape[AXIS])
    sizes = _sizes(module, spec, mesh, 1, length, packed)
    device = accelerator(mesh) if device is None else device
    return exchange_refusal(sizes, module.sequence_impl, implementation=module.attention_impl, device=device)


def _ways_out(module: Any, mesh: Any, length: int, packed: bool | None, device: Accelerator | None) -> str:
    """Say what every layer takes in place of rows that some layer refused, each of it tried."""

    def runs(module: Any, mesh: Any, length: int) -> bool:
        return _refusal(module, mesh, length, packed, device) is None

    slices = mesh.shape[AXIS]
    named = [field for field in ("sequence_impl", "attention_impl") if getattr(module, field) != "auto"]
    ways = [f"{field}='auto'" for field in named if runs(module.clone(**{field: "auto"}), mesh, length)]
    rows = length_advice(length, lambda length: runs(module, mesh, length), step=slices, largest=module.max_length)
    ways += [rows] if rows else []
    if ways:
        return f"Use {', or '.join(ways)}."
    smaller = next(size for size in range(slices - 1, 0, -1) if runs(module, _with_slices(mesh, size), length))
    return f"No row within the context of {module.max_length} fits sequence={slices}. Use sequence={smaller}."


def _with_slices(mesh: Any, slices: int) -> AbstractMesh:
    """Give a mesh with another sequence axis."""
    abstract = getattr(mesh, "abstract_mesh", mesh)
    return abstract.update(axis_sizes=tuple({**mesh.shape, AXIS: slices}.values()))


def _kinds(module: Any, mesh: Any) -> Iterator[tuple[Any, int]]:
    """Count the layers of each kind; none where no positions are split."""
    if mesh.shape.get(AXIS, 1) > 1:
        layers = getattr(module, "training_layers", getattr(module, "layers", ()))
        # A module of the user's own may call anything `layers`, a number too.
        mixers = [layer.mixer for layer in layers if hasattr(layer, "mixer")] if isinstance(layers, tuple) else []
        known = [spec if isinstance(spec, ScanSpec) else attention_form(spec) for spec in mixers]
        yield from collections.Counter(spec for spec in known if spec is not None).items()


def _sizes(module: Any, spec: AttentionSpec, mesh: Any, rows: int, length: int, packed: bool) -> AttentionSizes:
    window, chunk = layer_limits(spec.window, spec.chunk, in_documents=packed)
    return placed_sizes(
        mesh,
        (rows, length, spec.num_heads, spec.head_dim),
        spec.num_kv_heads,
        module.dtype,
        is_masked=packed,
        has_sinks=spec.sinks,
        has_softcap=spec.softcap is not None,
        has_dropout=module.attention_dropout_rate > 0,
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

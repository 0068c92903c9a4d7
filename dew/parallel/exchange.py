"""Attention whose positions are split over the sequence axis: one exchange per call, manual over the whole mesh.

Entry points: `splits_positions`, `sequence_attention`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from dew.arrays import Array, Float
from dew.kernels.attention import Implementation, Visibility, one_width
from dew.kernels.dropout import AttentionDropout
from dew.parallel.attention_kernel import own_kv_heads
from dew.parallel.attention_shard import AttentionShard, SplitAttention
from dew.parallel.banded import banded_attention
from dew.parallel.choice import SequenceImplementation, choose_exchange
from dew.parallel.gather import gather_attention
from dew.parallel.ring import ring_attention
from dew.parallel.traffic import AttentionSizes
from dew.parallel.ulysses import ulysses_attention
from dew.placement.layout import LayoutRefused
from dew.placement.rules import DEFAULT_RULES, resolve

QUERY_NAMES = ("activation_batch", "activation_length", "activation_heads", None)
KEY_NAMES = ("activation_batch", "activation_length", "activation_kv", None)
AXIS = "sequence"
_ATTEND = {
    "all_to_all": ulysses_attention,
    "gather": gather_attention,
    "ring": ring_attention,
    "banded": banded_attention,
}


def splits_positions(mesh: Any) -> bool:
    """Say whether a mesh splits positions in code that is not manual over them already.

    Args:
        mesh: The mesh in context, possibly empty.
    """
    return not mesh.empty and mesh.shape.get(AXIS, 1) > 1 and AXIS not in mesh.manual_axes


def sequence_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    *,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    implementation: Implementation = "auto",
    sequence_impl: SequenceImplementation = "auto",
    dropout: AttentionDropout | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attend within rows whose positions are split over the mesh in context.

    The code is manual over all mesh axes: rows over those of the batch, heads over tensor, positions over sequence.
    Manual over sequence alone, GSPMD would gather a dozen operands around it.

    Args:
        query: Rotated queries.
        key: Rotated keys.
        value: Values; where their width is not that of the keys, the narrower are sent as wide as the wider.
        visibility: Segments and window of whole rows, as `dew.nn.masks.causal_visibility` gives them.
        scale: Factor on the logits.
        softcap: Bound of the logits; None leaves them.
        sinks: Logit of each query head that joins its softmax without a value; None means none.
        implementation: Kernel of `dew.kernels.attention`.
        sequence_impl: Exchange to take; "auto" chooses by `dew.parallel.choice`.
        dropout: What drops the probabilities of the softmax in training; None drops none.

    Returns:
        The mixed values, placed as `query`.

    Raises:
        LayoutRefused: If the exchange named, or none at all, can run the call with the kernel named; the text gives
            lengths that work.
    """
    mesh = jax.sharding.get_abstract_mesh()
    segments, value_dim = visibility.query_segments, value.shape[-1]
    query, key, value = one_width(query, key, value)
    sizes = placed_sizes(
        mesh,
        query.shape,
        key.shape[2],
        query.dtype,
        is_masked=segments is not None,
        has_sinks=sinks is not None,
        has_softcap=softcap is not None,
        has_dropout=dropout is not None,
        window=visibility.window,
        chunk=visibility.chunk,
    )
    rows, positions, heads, kv_heads = _places(mesh, query.shape, key.shape[2])
    choice = choose_exchange(sizes, sequence_impl, implementation=implementation)
    call = SplitAttention(
        axis=AXIS,
        shards=sizes.shards,
        scale=scale,
        softcap=softcap,
        window=visibility.window,
        chunk=visibility.chunk,
        implementation=implementation,
    )

    def run(query: Array, key: Array, value: Array, segments: Any, sinks: Any, dropout: Any) -> Array:
        if heads is not None and kv_heads is None:
            key, value = (own_kv_heads(x, query.shape[2], mesh, heads, dim=2) for x in (key, value))
        return _ATTEND[choice.path](AttentionShard(query, key, value, segments, sinks, dropout, call))

    by_query, by_key = PartitionSpec(rows, positions, heads), PartitionSpec(rows, positions, kv_heads)
    of_rows = PartitionSpec() if segments is None or segments.shape[0] == 1 else PartitionSpec(rows)
    by_mask = None if dropout is None else dropout.specs(rows, heads)
    mixed = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(by_query, by_key, by_key, of_rows, PartitionSpec(heads), by_mask),
        out_specs=by_query,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(query, key, value, segments, sinks, dropout)
    return mixed[..., :value_dim]


def placed_sizes(mesh: Any, shape: tuple[int, ...], num_kv_heads: int, dtype: Any, **facts: Any) -> AttentionSizes:
    """Work out what one device of a mesh gets of a call under the active rules.

    Args:
        mesh: A concrete, abstract or planned mesh that splits positions.
        shape: Shape of the queries, [B, T, N, H].
        num_kv_heads: Key/value heads of all.
        dtype: Compute dtype.
        **facts: Further fields of `AttentionSizes`.

    Returns:
        The sizes, those of a length that does not divide included: `choose_exchange` knows which do.

    Raises:
        LayoutRefused: If the rules do not split the positions over sequence.
    """
    length, shards = shape[1], mesh.shape[AXIS]
    even = -(-length // shards) * shards
    rows, positions, heads, kv_heads = _places(mesh, (shape[0], even, *shape[2:]), num_kv_heads)
    if positions != AXIS:
        raise LayoutRefused(
            f"The rules put activation_length on {positions or 'no axis'}, but attention splits positions over "
            f"sequence={shards} alone. Use the rule ('activation_length', 'sequence'), or a mesh with sequence=1."
        )
    return AttentionSizes(
        rows=shape[0] // _size(mesh, rows),
        num_queries=length,
        num_keys=length,
        num_heads=shape[2] // _size(mesh, heads),
        num_kv_heads=_read_kv_heads(shape[2], num_kv_heads, _size(mesh, heads), kv_heads is not None),
        head_dim=shape[3],
        dtype=jnp.dtype(dtype).name,
        shards=shards,
        **facts,
    )


def _places(mesh: Any, shape: tuple[int, ...], num_kv_heads: int) -> tuple[Any, Any, Any, Any]:
    """Give the mesh axes of rows, positions, query heads and key/value heads."""
    rules = nn.get_logical_axis_rules() or DEFAULT_RULES
    rows, positions, heads, _ = _padded(resolve(QUERY_NAMES, shape, mesh, rules).spec)
    kv_shape = (*shape[:2], num_kv_heads, shape[3])
    kv_heads = _padded(resolve(KEY_NAMES, kv_shape, mesh, rules).spec)[2]
    # Split in another way than the query heads that read them, key/value heads would meet the wrong ones.
    return rows, positions, heads, kv_heads if kv_heads == heads else None


def _padded(spec: PartitionSpec) -> tuple[Any, ...]:
    return (*spec, *(None,) * (4 - len(spec)))


def _size(mesh: Any, axes: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in _tuple(axes))


def _tuple(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _read_kv_heads(num_heads: int, num_kv_heads: int, tensor: int, splits: bool) -> int:
    """Count the key/value heads that one tensor shard holds: its own, or those its query heads read."""
    if splits or tensor == 1:
        return num_kv_heads // (tensor if splits else 1)
    own = num_heads // tensor
    return own // math.gcd(own, num_heads // num_kv_heads)

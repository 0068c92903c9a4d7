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
from dew.kernels.attention import Implementation, Visibility
from dew.parallel.attention_shard import AttentionShard
from dew.parallel.gather import gather_attention
from dew.parallel.ulysses import ulysses_attention
from dew.placement.layout import LayoutRefused
from dew.placement.rules import DEFAULT_RULES, resolve

QUERY_NAMES = ("activation_batch", "activation_length", "activation_heads", None)
KEY_NAMES = ("activation_batch", "activation_length", "activation_kv", None)
AXIS = "sequence"


def splits_positions(mesh: Any) -> bool:
    """Say whether a mesh splits positions in code that is not manual over them already.

    Args:
        mesh: The mesh in context, possibly empty.
    """
    return not mesh.empty and mesh.shape.get(AXIS, 1) > 1 and AXIS not in mesh.manual_axes


def sequence_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T N H"]:
    """Attend within rows whose positions are split over the mesh in context.

    The code is manual over all mesh axes: rows over those of the batch, heads over tensor, positions over sequence.
    Manual over sequence alone, GSPMD would gather a dozen operands around it.

    Args:
        query: Rotated queries.
        key: Rotated keys.
        value: Values.
        visibility: Segments and window of whole rows, as `dew.nn.masks.causal_visibility` gives them.
        scale: Factor on the logits.
        softcap: Bound of the logits; None leaves them.
        sinks: Logit of each query head that joins its softmax without a value; None means none.
        implementation: Kernel of `dew.kernels.attention`.

    Returns:
        The mixed values, placed as `query`.

    Raises:
        LayoutRefused: If the length does not divide over the devices that hold positions.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rules = nn.get_logical_axis_rules() or DEFAULT_RULES
    length, shards = query.shape[1], mesh.shape[AXIS]
    specs = [_padded(resolve(names, x.shape, mesh, rules).spec) for names, x in _named(query, key)]
    (rows, positions, heads, _), (_, _, kv_heads, _) = specs
    if positions != AXIS:
        raise LayoutRefused(refused_length(length, shards, 1))
    segments = visibility.query_segments

    def run(query: Array, key: Array, value: Array, segments: Array | None, sinks: Array | None) -> Array:
        if heads is not None and kv_heads is None:
            key, value = (_heads_of_group(x, query.shape[2], mesh, heads) for x in (key, value))
        shard = AttentionShard(
            query,
            key,
            value,
            segments,
            sinks,
            axis=AXIS,
            shards=shards,
            scale=scale,
            softcap=softcap,
            window=visibility.window,
            chunk=visibility.chunk,
            implementation=implementation,
        )
        if query.shape[2] % shards == 0:
            return ulysses_attention(shard)
        if length % (2 * shards):
            raise LayoutRefused(refused_length(length, shards, 2))
        return gather_attention(shard)

    by_query, by_key = PartitionSpec(rows, positions, heads), PartitionSpec(rows, positions, kv_heads)
    of_rows = PartitionSpec() if segments is None or segments.shape[0] == 1 else PartitionSpec(rows)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(by_query, by_key, by_key, of_rows, PartitionSpec(heads)),
        out_specs=by_query,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(query, key, value, segments, sinks)


def refused_length(length: int, shards: int, chunks: int) -> str:
    """Say which lengths near a refused one work."""
    step = shards * chunks
    below = length // step * step
    works = " or ".join(str(size) for size in (below, below + step) if size)
    return (
        f"Rows of {length} positions do not divide into {step} equal parts, which attention on a mesh with "
        f"sequence={shards} needs. Use rows of {works} positions."
    )


def _named(query: Array, key: Array) -> tuple[tuple[Any, Array], ...]:
    return (QUERY_NAMES, query), (KEY_NAMES, key)


def _padded(spec: PartitionSpec) -> tuple[Any, ...]:
    return (*spec, *(None,) * (4 - len(spec)))


def _heads_of_group(x: Array, num_heads: int, mesh: Any, axes: Any) -> Array:
    """Pick the key/value heads, whole on every tensor shard, that this shard's query heads read.

    Args:
        x: Keys or values with all heads.
        num_heads: Query heads of one shard.
        mesh: The mesh.
        axes: Mesh axes of the query heads.
    """
    count = math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
    group = num_heads * count // x.shape[2]
    unit = math.gcd(num_heads, group)
    first = jax.lax.axis_index(axes) * num_heads
    return jnp.take(x, (first + unit * jnp.arange(num_heads // unit)) // group, axis=2)

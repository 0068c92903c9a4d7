"""One-device attention kernels on a mesh that splits rows and heads: nothing is exchanged.

Entry points: `sharded_attention`, `attention` for code that GSPMD partitions, and `own_kv_heads`. GSPMD partitions
plain XLA operations; compiled kernels run in a `shard_map`, and so do query heads that are split beside key/value heads
that are not: each device picks those that its queries read, no copy for every query head. No bytes move.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from dew.arrays import Array, Float
from dew.kernels.attention import Visibility, attention
from dew.kernels.attention_choice import AttentionCall, Implementation, attention_choice
from dew.kernels.dropout import AttentionDropout
from dew.placement.rules import DEFAULT_RULES, resolve

QUERY_NAMES = ("activation_batch", None, "activation_heads", None)
KEY_NAMES = ("activation_batch", "activation_kv", None, None)


def sharded_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    *,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    implementation: Implementation = "auto",
    dropout: AttentionDropout | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attend within rows that a mesh splits, with heads that it splits; arguments as `attention`'s.

    Raises:
        ValueError: As `attention` does, for the part of the call that one device gets.
    """
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "implementation": implementation}
    mesh = jax.sharding.get_abstract_mesh()
    left = set(mesh.axis_names) - set(mesh.manual_axes)
    if mesh.empty or mesh.size == 1 or not left:
        return attention(query, key, value, visibility=visibility, sinks=sinks, dropout=dropout, **options)
    rules = nn.get_logical_axis_rules() or DEFAULT_RULES
    by_query = _padded(resolve(QUERY_NAMES, query.shape, mesh, rules).spec)
    by_key = _padded(resolve(KEY_NAMES, key.shape, mesh, rules).spec)
    picks = by_query[2] is not None and by_key[1] != by_query[2]
    if by_key[1] != by_query[2]:
        by_key = (by_key[0], None, None, None)
    call = AttentionCall.of(query, key, visibility, softcap, sinks, value.shape[-1], dropout)
    call = call.part(_shards(mesh, by_query[0]), _shards(mesh, by_query[2]))
    if not picks and attention_choice(call, implementation).kernel == "xla":
        options["implementation"] = "xla"
        return attention(query, key, value, visibility=visibility, sinks=sinks, dropout=dropout, **options)

    slots, structure = jax.tree.flatten(visibility)

    def part(query, key, value, slots, sinks, dropout):
        own = jax.tree.unflatten(structure, slots)
        if picks:
            key, value = (own_kv_heads(x, query.shape[2], mesh, by_query[2], dim=1) for x in (key, value))
        return attention(query, key, value, visibility=own, sinks=sinks, dropout=dropout, **options)

    by_slot = [PartitionSpec(by_query[0] if x.shape[0] > 1 else None) for x in slots]
    by_sink = None if sinks is None else PartitionSpec(by_query[2])
    by_mask = None if dropout is None else dropout.specs(by_query[0], by_query[2])
    specs = (PartitionSpec(*by_query), PartitionSpec(*by_key), PartitionSpec(*by_key), by_slot, by_sink, by_mask)
    run = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=left, check_vma=False)
    return run(query, key, value, slots, sinks, dropout)


def own_kv_heads(x: Array, num_heads: int, mesh: Any, axes: Any, *, dim: int) -> Array:
    """Pick the key/value heads, whole on every shard, that this shard's query heads read, each of them once.

    Args:
        x: Keys or values with all heads.
        num_heads: Query heads of one shard.
        mesh: The mesh.
        axes: Mesh axes of the query heads.
        dim: Dimension of the heads.
    """
    if x.shape[dim] == 1:
        return x
    group = num_heads * _shards(mesh, axes) // x.shape[dim]
    unit = math.gcd(num_heads, group)
    first = jax.lax.axis_index(axes) * num_heads
    return jnp.take(x, (first + unit * jnp.arange(num_heads // unit)) // group, axis=dim)


def _padded(spec: PartitionSpec) -> tuple[Any, ...]:
    return (*spec, *(None,) * (4 - len(spec)))


def _shards(mesh: Any, entry: Any) -> int:
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size

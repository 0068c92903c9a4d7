"""Attention by trading positions for heads: each device attends the whole sequence with some of the heads.

Entry point: `ulysses_attention` (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509). A slice of b rows, t positions,
n query heads and k key/value heads costs four all-to-alls of b t n H or b t k' H elements a device, forward and
backward alike, of which (N - 1) / N leave it; k' is k repeated until the N devices divide it.
"""

import math

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.parallel.attention_shard import AttentionShard


def ulysses_attention(shard: AttentionShard) -> Float[Array, "B t N H"]:
    """Attend after an all-to-all of queries, keys and values, and trade the result back.

    Args:
        shard: This device's part; `shards` divides its query heads.

    Returns:
        The mixed values of this device's positions.
    """
    repeats = traded_kv_heads(shard.key.shape[2], shard.shards) // shard.key.shape[2]
    pairs = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (shard.key, shard.value))
    query, key, value = (_trade(x, shard.axis, given=2, taken=1) for x in (shard.query, *pairs))
    sinks = shard.sinks
    if sinks is not None:
        sinks = jax.lax.dynamic_slice_in_dim(sinks, shard.index() * query.shape[2], query.shape[2])
    mixed = shard.attend(query, key, value, first_query=0, first_key=0, sinks=sinks)
    return _trade(mixed, shard.axis, given=1, taken=2)


def traded_kv_heads(num_kv_heads: int, shards: int) -> int:
    """Count key/value heads after the repetition that lets `shards` devices divide them.

    Query heads that divide over the devices and share key/value heads evenly also share the repeated ones evenly.

    Args:
        num_kv_heads: Key/value heads of one tensor shard.
        shards: Devices of the sequence axis.
    """
    return math.lcm(num_kv_heads, shards)


def _trade(x: Array, axis: str, *, given: int, taken: int) -> Array:
    return jax.lax.all_to_all(x, axis, split_axis=given, concat_axis=taken, tiled=True)

"""Attention by trading positions for heads: each device attends the whole sequence with some of the heads.

Entry points: `ulysses_attention` (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), `ulysses_transfers`. With a
slice of q bytes of queries and k of keys: all-to-alls of q + 2 k' + q bytes, the same again in the backward pass; k' is
k times the repetition of key/value heads that lets N devices divide them. Of each, (N - 1) / N leaves the device.
"""

import math

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.parallel.attention_shard import AttentionShard
from dew.parallel.traffic import AttentionSizes, Transfer


def ulysses_attention(shard: AttentionShard) -> Float[Array, "B t N H"]:
    """Attend after an all-to-all of queries, keys and values, and trade the result back.

    Args:
        shard: This device's part; `shards` divides its query heads.

    Returns:
        The mixed values of this device's positions.
    """
    call = shard.call
    repeats = traded_kv_heads(shard.key.shape[2], call.shards) // shard.key.shape[2]
    pairs = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (shard.key, shard.value))
    query, key, value = (_trade(x, call.axis, given=2, taken=1) for x in (shard.query, *pairs))
    heads = call.index() * query.shape[2], query.shape[2]
    sinks, dropout = shard.sinks, shard.dropout
    if sinks is not None:
        sinks = jax.lax.dynamic_slice_in_dim(sinks, *heads)
    if dropout is not None:
        dropout = dropout.of_heads(*heads)
    mixed = call.attend(query, key, value, (shard.segments, shard.segments), sinks, dropout, starts=(0, 0))
    return _trade(mixed, call.axis, given=1, taken=2)


def ulysses_transfers(sizes: AttentionSizes) -> tuple[Transfer, ...]:
    """List what the exchange sends.

    Args:
        sizes: The call.
    """
    repeats = traded_kv_heads(sizes.num_kv_heads, sizes.shards) // sizes.num_kv_heads
    size = 2 * sizes.query_bytes + 2 * repeats * sizes.key_bytes
    return tuple(
        Transfer(kind="all-to-all", result_bytes=size, shards=sizes.shards, in_backward=backward)
        for backward in (False, True)
    )


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

"""Attention with split queries beside whole keys and values, for any number of heads.

Entry points: `gather_attention`, `gather_transfers`. With a slice of q bytes of queries, k of keys and k32 of keys in
float32: all-gathers of 2 N k bytes, permutes of 2 q (queries striped, their result back); backward reduce-scatters of
2 k32, permutes of 2 q. (N - 1) / N of an all-gather arrives from elsewhere, of a reduce-scatter N - 1 times its result.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.arrays import Array, Float
from dew.parallel.attention_shard import AttentionShard, SplitAttention
from dew.parallel.pieces import Blocks, Result, add_piece, finished, no_pieces, piece_gradients
from dew.parallel.stripes import from_stripes, stripe_bytes, stripe_starts, to_stripes
from dew.parallel.traffic import AttentionSizes, Transfer


def gather_attention(shard: AttentionShard) -> Float[Array, "B t N H"]:
    """Attend from two blocks of queries to the gathered keys and values, block by block.

    A block of keys after the queries' own is not computed: with striped queries every device computes 2 N + 1 of the
    4 N pairs of blocks, fewer with a window or chunks (`block_pairs`). A query and a key cost 14 H operations, forward
    and backward, where attention that keeps its logits computes all pairs for 12 H each.

    Args:
        shard: This device's part, of an even number of positions.

    Returns:
        The mixed values of this device's positions.
    """
    call = shard.call
    queries = jnp.stack(to_stripes(shard.query, call.axis, call.shards))
    starts = jnp.stack(stripe_starts(call.index(), shard.slice_length, call.shards))
    mixed, logsumexp = _attend(call, queries, shard.key, shard.value, starts, shard.segments, shard.dropout)
    early, late = finished(mixed, logsumexp, shard)
    return from_stripes(early, late, call.axis, call.shards)


def gather_transfers(sizes: AttentionSizes) -> tuple[Transfer, ...]:
    """List what the exchange sends.

    Args:
        sizes: The call.
    """
    shards = sizes.shards
    stripes = 2 * stripe_bytes(sizes.query_bytes, shards)
    return (
        Transfer(kind="all-gather", result_bytes=2 * shards * sizes.key_bytes, shards=shards),
        Transfer(kind="collective-permute", result_bytes=stripes, shards=shards),
        Transfer(kind="reduce-scatter", result_bytes=2 * sizes.wide_key_bytes, shards=shards, in_backward=True),
        Transfer(kind="collective-permute", result_bytes=stripes, shards=shards, in_backward=True),
    )


def block_pairs(shards: int, block: int, span: int | None) -> np.ndarray:
    """List, per device, which of its two blocks of queries reads which block of keys.

    Args:
        shards: Devices N; the sequence has 2 N blocks, and device i holds i and 2 N - 1 - i.
        block: Positions of a block.
        span: How many positions a query reads, itself included; None means all before it.

    Returns:
        int32 [N, pairs, 2]: number of the block of queries, 0 or 1, and of the block of keys. A device with fewer pairs
        than another fills up with the last block of keys, which its early block cannot read.
    """
    behind = 2 * shards if span is None else -(-(span - 1) // block)
    pairs = [
        [(number, key) for number, own in enumerate((device, 2 * shards - 1 - device)) for key in _range(own, behind)]
        for device in range(shards)
    ]
    longest = max(map(len, pairs))
    return np.array([own + [(0, 2 * shards - 1)] * (longest - len(own)) for own in pairs], np.int32)


def _range(own: int, behind: int) -> range:
    return range(max(0, own - behind), own + 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    call: SplitAttention, queries: Array, key: Array, value: Array, starts: Array, segments: Any, dropout: Any
) -> Result:
    return _attend_forward(call, queries, key, value, starts, segments, dropout)[0]


def _attend_forward(call, queries, key, value, starts, segments, dropout):
    key, value = (jax.lax.all_gather(x, call.axis, axis=1, tiled=True) for x in (key, value))
    blocks, size = Blocks(queries, starts, segments, dropout), queries.shape[2]

    def step(result: Result, pair: Array) -> tuple[Result, None]:
        return add_piece(call, blocks, result, pair[0], _keys(key, value, pair[1] * size, size)), None

    result, _ = jax.lax.scan(step, no_pieces(queries), _own_pairs(call, size))
    return result, (blocks, key, value, result)


def _attend_backward(call, residuals, cotangent):
    blocks, key, value, result = residuals
    size = blocks.queries.shape[2]

    def step(sums, pair):
        keys = _keys(key, value, pair[1] * size, size)
        by_query, *by_keys = piece_gradients(call, blocks, result, cotangent, pair[0], keys)
        by_queries = sums[0].at[pair[0]].add(by_query.astype(jnp.float32))
        return (by_queries, *(_added(x, y, keys[2]) for x, y in zip(sums[1:], by_keys, strict=True))), None

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (blocks.queries, key, value)]
    (by_queries, *by_keys), _ = jax.lax.scan(step, tuple(zeros), _own_pairs(call, size))
    # Every device read every key: summed before they are rounded.
    summed = (jax.lax.psum_scatter(x, call.axis, scatter_dimension=1, tiled=True) for x in by_keys)
    return by_queries.astype(blocks.queries.dtype), *(x.astype(key.dtype) for x in summed), None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _own_pairs(call: SplitAttention, size: int) -> Array:
    spans = [span for span in (call.window, call.chunk) if span is not None]
    return jnp.asarray(block_pairs(call.shards, size, min(spans, default=None)))[call.index()]


def _keys(key: Array, value: Array, start: Array, size: int) -> tuple[Array, Array, Array]:
    return (
        jax.lax.dynamic_slice_in_dim(key, start, size, 1),
        jax.lax.dynamic_slice_in_dim(value, start, size, 1),
        start,
    )


def _added(total: Array, part: Array, start: Array) -> Array:
    """Add to consecutive positions."""
    own = jax.lax.dynamic_slice_in_dim(total, start, part.shape[1], 1)
    return jax.lax.dynamic_update_slice_in_dim(total, own + part.astype(total.dtype), start, 1)

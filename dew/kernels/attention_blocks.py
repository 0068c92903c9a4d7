"""Attention of long rows in blocks of queries and keys, none of whose logits outlive their block.

Entry points: `blockwise_attention`, FlashAttention-2 (https://arxiv.org/abs/2307.08691, section 3.1) in XLA operations;
`blockwise_gradients`. A block of queries visits the key blocks from the first to the last it may read, found when the
program runs: the hidden half of a causal call, all beyond a window, and keys after a stripe of queries cost nothing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.kernels.dropout import AttentionDropout, drop_probabilities
from dew.kernels.products import wide_einsum
from dew.kernels.visibility import Visibility

QUERY_BLOCK = 256
"""Queries of a block."""
KEY_BLOCK = 256
"""Keys of a block."""
MASKED = -1e30
"""Logit of a hidden key, and log-sum-exp of a row that reads nothing: finite, so that none gives NaN."""
NO_SLOT = 2**31 - 1
"""Slot of the keys that fill up the last block: after every query."""


class _Slots(NamedTuple):
    """The arrays of a `Visibility`: which keys are visible, but for its limits."""

    queries: Array
    keys: Array
    query_segments: Array | None
    key_segments: Array | None


class _Limits(NamedTuple):
    """What else decides the logits, known when the program is traced."""

    window: int | None
    chunk: int | None
    scale: float
    softcap: float | None
    dtype: jnp.dtype


class _Block(NamedTuple):
    """A block of queries, beside the first and last key block that it may read."""

    slots: Array
    segments: Array | None
    first: Array
    last: Array


def blockwise_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    visibility: Visibility,
    scale: float,
    softcap: float | None,
    dtype: jnp.dtype,
    dropout: AttentionDropout | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Mix values and give the log-sum-exp of the logits, as `dew.kernels.attention_xla.xla_attention` does.

    Differentiable in reverse mode, in both results.
    """
    slots, limits = _seen(visibility, scale, softcap, dtype)
    return _attention(query, key, value, slots, dropout, limits)


def blockwise_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    visibility: Visibility,
    scale: float,
    softcap: float | None,
    result: tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]],
    cotangent: tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]],
    dropout: AttentionDropout | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S H"], Float[Array, "B K S Hv"]]:
    """Differentiate what these keys add, as `dew.kernels.attention_xla.xla_gradients` does."""
    slots, limits = _seen(visibility, scale, softcap, result[0].dtype)
    return _backward(limits, (query, key, value, slots, dropout, *result), cotangent)[:3]


def mean_gradient(
    result: tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]],
    cotangent: tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]],
) -> Float[Array, "B T N"]:
    """Give what the softmax takes off the gradient of each of a query's weights: their weighted mean.

    Args:
        result: Mixed values and log-sum-exp over all keys.
        cotangent: The cotangents of both.
    """
    (mixed, _), (by_mixed, by_logsumexp) = result, cotangent
    return jnp.sum(by_mixed.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1) - by_logsumexp


def pair_gradients(
    logits: Float[Array, "B K G T S"],
    value: Float[Array, "B K S Hv"],
    by_mixed: Float[Array, "B T K G Hv"],
    logsumexp: Float[Array, "B K G T"],
    mean: Float[Array, "B K G T"],
    visibility: Visibility,
    dropout: AttentionDropout | None,
) -> tuple[Float[Array, "B K G T S"], Float[Array, "B K G T S"]]:
    """Give the gradients of logits, and the weights of their values, by what is known of all keys.

    Args:
        logits: Logits of some of the keys, `MASKED` where hidden.
        value: Values of these keys.
        by_mixed: Cotangent of the mixed values.
        logsumexp: Log-sum-exp over all keys.
        mean: What `mean_gradient` gives.
        visibility: Where these queries and keys are.
        dropout: What drops probabilities; None drops none.
    """
    # A row that reads nothing has MASKED for its log-sum-exp: its hidden keys would weigh 1.
    weights = jnp.where(logits > MASKED / 2, jnp.exp(logits - logsumexp[..., None]), 0.0)
    by_weights = drop_probabilities(dropout, wide_einsum("BTKGH,BKSH->BKGTS", by_mixed, value), visibility)
    return weights * (by_weights - mean[..., None]), drop_probabilities(dropout, weights, visibility)


def _seen(visibility, scale, softcap, dtype):
    """Tell the arrays that decide the logits from what is known when the program is traced."""
    slots = _Slots(visibility.query_slots, visibility.key_slots, visibility.query_segments, visibility.key_segments)
    return slots, _Limits(visibility.window, visibility.chunk, scale, softcap, jnp.dtype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(query, key, value, slots, dropout, limits):
    return _forward(query, key, value, slots, dropout, limits)[0]


def _forward(query, key, value, slots, dropout, limits):
    B, T, N, _ = query.shape
    K = key.shape[1]
    rows, keys = _query_blocks(slots, limits), _key_blocks(key, value, slots)
    start = (
        jnp.full((B, K, N // K, QUERY_BLOCK), MASKED / 2, jnp.float32),
        jnp.zeros((B, K, N // K, QUERY_BLOCK), jnp.float32),
        jnp.zeros((B, K, N // K, QUERY_BLOCK, value.shape[-1]), jnp.float32),
    )

    def of_queries(_, block):
        query, row = block

        def visit(index, carry):
            highest, total, mixed = carry
            _, value, logits, _, own = _logits(query, row, keys, index, limits)
            new = jnp.maximum(highest, jnp.max(logits, axis=-1))
            weights, shrink = jnp.exp(logits - new[..., None]), jnp.exp(highest - new)
            kept = drop_probabilities(dropout, weights, own)
            added = wide_einsum("BKGTS,BKSH->BKGTH", kept.astype(value.dtype), value)
            return new, total * shrink + jnp.sum(weights, axis=-1), mixed * shrink[..., None] + added

        highest, total, mixed = jax.lax.fori_loop(row.first, row.last + 1, visit, start)
        reads = total > 0
        total = jnp.where(reads, total, 1.0)
        return None, (
            (mixed / total[..., None]).astype(limits.dtype),
            jnp.where(reads, highest + jnp.log(total), MASKED),
        )

    _, (mixed, logsumexp) = jax.lax.scan(of_queries, None, (_cut(query, K), rows))
    results = _join(mixed, T), _join(logsumexp[..., None], T)[..., 0]
    return results, (query, key, value, slots, dropout, *results)


def _backward(limits, kept, cotangents):
    query, key, value, slots, dropout, mixed, logsumexp = kept
    T, K = query.shape[1], key.shape[1]
    rows, keys = _query_blocks(slots, limits), _key_blocks(key, value, slots)
    mean = mean_gradient((mixed, logsumexp), cotangents)

    def of_queries(sums, block):
        query, by_mixed, logsumexp, mean, row = block
        logsumexp, mean = (jnp.moveaxis(x[..., 0], 1, 3) for x in (logsumexp, mean))

        def visit(index, carry):
            by_query, by_key, by_value = carry
            key, value, logits, slope, own = _logits(query, row, keys, index, limits)
            by_logits, weights = pair_gradients(logits, value, by_mixed, logsumexp, mean, own, dropout)
            by_logits, weights = (by_logits * slope).astype(key.dtype), weights.astype(value.dtype)
            by_query += wide_einsum("BKGTS,BKSH->BTKGH", by_logits, key)
            by_key = _add(by_key, index, "BKGTS,BTKGH->BKSH", by_logits, query)
            return by_query, by_key, _add(by_value, index, "BKGTS,BTKGH->BKSH", weights, by_mixed)

        start = (jnp.zeros(query.shape, jnp.float32), *sums)
        by_query, *sums = jax.lax.fori_loop(row.first, row.last + 1, visit, start)
        return tuple(sums), by_query.astype(query.dtype)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[:2])
    blocks = (_cut(query, K), _cut(cotangents[0].astype(value.dtype), K), _cut(logsumexp[..., None], K))
    (by_key, by_value), by_query = jax.lax.scan(of_queries, zeros, (*blocks, _cut(mean[..., None], K), rows))
    by_query = jnp.moveaxis(by_query, 0, 1).reshape(query.shape[0], -1, *query.shape[2:])[:, :T]
    by_key, by_value = (x[:, :, : key.shape[2]].astype(key.dtype) for x in (by_key, by_value))
    return by_query, by_key, by_value, None, None


_attention.defvjp(_forward, _backward)


def _logits(query, row, keys, index, limits):
    """Compute a block's logits; also give its keys and values, their slope by the products, and what is visible."""
    key, value, slots = (
        jax.lax.dynamic_slice_in_dim(x, index * KEY_BLOCK, KEY_BLOCK, axis)
        for x, axis in zip(keys[:3], (2, 2, 1), strict=True)
    )
    segments = keys[3]
    if segments is not None:
        segments = jax.lax.dynamic_slice_in_dim(segments, index * KEY_BLOCK, KEY_BLOCK, 1)
    logits = wide_einsum("BTKGH,BKSH->BKGTS", query, key) * limits.scale
    slope: Array | float = limits.scale
    if limits.softcap is not None:
        bounded = jnp.tanh(logits / limits.softcap)
        logits, slope = limits.softcap * bounded, limits.scale * (1.0 - bounded * bounded)
    own = Visibility(row.slots, slots, row.segments, segments, window=limits.window, chunk=limits.chunk)
    return key, value, jnp.where(own.mask()[:, None, None], logits, MASKED), slope, own


def _add(sums, index, product, left, right):
    """Add a product to the rows of a block of keys."""
    added = wide_einsum(product, left, right)
    old = jax.lax.dynamic_slice_in_dim(sums, index * KEY_BLOCK, KEY_BLOCK, 2)
    return jax.lax.dynamic_update_slice_in_dim(sums, old + added, index * KEY_BLOCK, 2)


def _padded(x, axis, block, value=0):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=value)


def _cut(x, num_kv_heads):
    """Cut [B, T, N, H] into blocks of queries, [blocks, B, T', K, G, H]."""
    x = _padded(x, 1, QUERY_BLOCK)
    x = x.reshape(x.shape[0], -1, QUERY_BLOCK, num_kv_heads, x.shape[2] // num_kv_heads, x.shape[3])
    return jnp.moveaxis(x, 1, 0)


def _join(blocks, num_queries):
    """Join results [blocks, B, K, G, T', H] to [B, T, N, H]."""
    count, B, K, G, length, H = blocks.shape
    return jnp.moveaxis(blocks, (0, 4), (1, 2)).reshape(B, count * length, K * G, H)[:, :num_queries]


def _key_blocks(key, value, slots):
    """Fill up keys, values, slots and segments to whole blocks."""
    return (
        _padded(key, 2, KEY_BLOCK),
        _padded(value, 2, KEY_BLOCK),
        _padded(slots.keys, 1, KEY_BLOCK, NO_SLOT),
        None if slots.key_segments is None else _padded(slots.key_segments, 1, KEY_BLOCK),
    )


def _query_blocks(slots, limits):
    """Cut slots and segments of the queries, and find the key blocks that each block may read."""

    def cut(x, block):
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)], mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], -1, block), 1, 0)

    queries, keys = cut(slots.queries, QUERY_BLOCK), cut(slots.keys, KEY_BLOCK)
    lowest, highest = jnp.min(queries, axis=(1, 2))[:, None], jnp.max(queries, axis=(1, 2))[:, None]
    first, last = jnp.min(keys, axis=(1, 2)), jnp.max(keys, axis=(1, 2))
    reads = first <= highest
    if limits.window is not None:
        reads &= last > lowest - limits.window
    if limits.chunk is not None:
        reads &= last // limits.chunk >= lowest // limits.chunk
    numbers = jnp.arange(reads.shape[1], dtype=jnp.int32)
    return _Block(
        queries,
        None if slots.query_segments is None else cut(slots.query_segments, QUERY_BLOCK),
        jnp.min(jnp.where(reads, numbers, reads.shape[1]), axis=1),
        jnp.max(jnp.where(reads, numbers, -1), axis=1),
    )

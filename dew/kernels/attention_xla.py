"""Attention in plain XLA operations: short rows keep their logits, long ones go through blocks.

Entry points: `xla_attention`; `xla_gradients` of some of the keys. The blocks are in `dew.kernels.attention_blocks`.
"""

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.kernels.attention_blocks import (
    MASKED,
    blockwise_attention,
    blockwise_gradients,
    mean_gradient,
    pair_gradients,
)
from dew.kernels.dropout import AttentionDropout, drop_probabilities
from dew.kernels.products import wide_einsum
from dew.kernels.visibility import Visibility

DENSE_QUERIES = 512
"""Up to this many queries the logits [B, N, T, S] are kept for the backward pass."""


def xla_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    visibility: Visibility,
    scale: float,
    softcap: float | None,
    dtype: jnp.dtype,
    dropout: AttentionDropout | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Mix values and give the log-sum-exp of the logits; differentiable in both.

    Returns:
        The mixed values in `dtype`, zero in rows that read nothing, and the float32 log-sum-exp, `MASKED` there.
    """
    if query.shape[1] <= DENSE_QUERIES:
        return _dense(query, key, value, visibility, scale, softcap, dtype, dropout)
    return blockwise_attention(query, key, value, visibility, scale, softcap, dtype, dropout)


def xla_gradients(
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
    """Differentiate what these keys add to a result over them and others; as `partial_gradients`."""
    given = visibility, scale, softcap, result, cotangent, dropout
    if query.shape[1] <= DENSE_QUERIES:
        return _dense_gradients(query, key, value, *given)
    return blockwise_gradients(query, key, value, *given)


def _dense_gradients(query, key, value, visibility, scale, softcap, result, cotangent, dropout):
    """Gradients with all logits at once."""
    logits, pull = jax.vjp(lambda query, key: _logits(query, key, visibility, scale, softcap), query, key)
    B, K, G, T, _ = logits.shape

    def of_groups(x):
        return jnp.moveaxis(x.reshape(B, T, K, G), 1, 3)

    by_mixed = cotangent[0].astype(value.dtype).reshape(B, T, K, G, -1)
    known = of_groups(result[1]), of_groups(mean_gradient(result, cotangent))
    by_logits, weights = pair_gradients(logits, value, by_mixed, *known, visibility, dropout)
    by_value = wide_einsum("BKGTS,BTKGH->BKSH", weights.astype(value.dtype), by_mixed)
    return *pull(by_logits), by_value.astype(value.dtype)


def _logits(query, key, visibility, scale, softcap):
    """Compute all logits, [B, K, G, T, S]."""
    B, T, N, H = query.shape
    K = key.shape[1]
    query_BTKGH = query.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("BTKGH,BKSH->BKGTS", query_BTKGH, key, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return jnp.where(visibility.mask()[:, None, None], logits, MASKED)


def _dense(query, key, value, visibility, scale, softcap, dtype, dropout):
    """Attention with all its logits at once."""
    key, value, visibility = _in_reach(query.shape[1], key, value, visibility)
    B, T, N, _ = query.shape
    K = key.shape[1]
    weights, logsumexp = _softmax(_logits(query, key, visibility, scale, softcap))
    weights = drop_probabilities(dropout, weights, visibility).astype(value.dtype)
    logsumexp = jnp.moveaxis(logsumexp[..., 0], 3, 1).reshape(B, T, N)
    if dtype != value.dtype:
        return wide_einsum("BKGTS,BKSH->BTKGH", weights, value).astype(dtype).reshape(B, T, N, -1), logsumexp
    if T == 1:
        # einsum would have XLA transpose the cached values at every token; in this order it reads them as they lie.
        batch = (((3,), (2,)), ((0, 1), (0, 1)))
        weights = weights.reshape(B, K, N // K, -1)
        mixed_BKGH = jax.lax.dot_general(weights, value, batch)
        return mixed_BKGH.reshape(B, T, N, -1), logsumexp
    return jnp.einsum("BKGTS,BKSH->BTKGH", weights, value).reshape(B, T, N, -1), logsumexp


def _in_reach(num_queries, key, value, visibility):
    """Cut the keys down to those that a window or chunk lets any of the queries read, where that is half or less."""
    spans = [span for span in (visibility.window, visibility.chunk) if span is not None]
    if not spans or not visibility.consecutive:
        return key, value, visibility
    slots, reach = key.shape[2], min(spans) + num_queries - 1
    if 2 * reach > slots:
        return key, value, visibility
    query_start, key_start = visibility.query_slots[0, 0], visibility.key_slots[0, 0]
    if visibility.window == min(spans):
        first = query_start - visibility.window + 1
    else:
        first = query_start // visibility.chunk * visibility.chunk
    first = jnp.clip(first - key_start, 0, slots - reach)

    def cut(x, axis):
        return jax.lax.dynamic_slice_in_dim(x, first, reach, axis)

    segments = None if visibility.key_segments is None else cut(visibility.key_segments, 1)
    visibility = visibility.replace(
        key_slots=cut(visibility.key_slots, 1), key_segments=segments, offset=None, key_start=None
    )
    return cut(key, 2), cut(value, 2), visibility


@jax.custom_jvp
def _softmax(logits: Array) -> tuple[Array, Array]:
    """Softmax over the last dimension, and its log-sum-exp; keeps the weights, and nothing else, for the backward pass.

    The weights of a row of hidden keys alone are zero.
    """
    highest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), MASKED / 2)
    exponentials = jnp.exp(logits - highest)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    reads = total > 0
    total = jnp.where(reads, total, 1.0)
    return exponentials / total, jnp.where(reads, highest + jnp.log(total), MASKED)


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    weights, logsumexp = _softmax(*primals)
    change = weights * tangents[0]
    total_change = jnp.sum(change, axis=-1, keepdims=True)
    return (weights, logsumexp), (change - weights * total_change, total_change)

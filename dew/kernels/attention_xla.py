"""Attention in plain XLA operations: short rows keep their logits, long ones go through blocks.

Entry point: `xla_attention`. The blocks are in `dew.kernels.attention_blocks`.
"""

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.kernels.attention_blocks import MASKED, blockwise_attention
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


def _dense(query, key, value, visibility, scale, softcap, dtype, dropout):
    """Attention with all its logits at once."""
    key, value, visibility = _in_reach(query.shape[1], key, value, visibility)
    B, T, N, H = query.shape
    K = key.shape[1]
    query_BTKGH = query.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("BTKGH,BKSH->BKGTS", query_BTKGH, key, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(visibility.mask()[:, None, None], logits, MASKED)
    weights, logsumexp = _softmax(logits)
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

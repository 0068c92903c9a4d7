"""Scaled dot-product attention on one device, with grouped key/value heads.

Entry point: `attention`; `Visibility` says which keys a query reads. Short sequences keep their
logits; long ones go through chunks of queries that are recomputed in the backward pass
(https://arxiv.org/abs/2112.05682).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from dew.arrays import Array, Bool, Float, Int

DENSE_QUERIES = 512
"""Up to this many queries the logits [B, N, T, S] are kept for the backward pass."""
QUERY_CHUNK = 256
"""Queries of one chunk above it."""
MASKED = -1e30
"""Logit of a hidden key: finite, so that a row that reads nothing gives no NaN."""

Implementation = Literal["auto", "xla"]


@struct.dataclass
class Visibility:
    """Which keys each query may read: not later than itself, within a window, and of the same segment.

    Two small vectors a side instead of a [T, S] mask: chunks of queries build only their own rows.

    Attributes:
        query_slots: Place of each query in the sequence of keys, [B or 1, T].
        key_slots: Place of each key, [B or 1, S].
        query_segments: Document number of each query, [B or 1, T]; None when all are one document.
        key_segments: Document number of each key, [B or 1, S]; a query reads its own number only.
        window: How many slots a query reads, its own included; None means all before it. With a window, queries lie in
            consecutive slots and keys in the slots from 0 on.
    """

    query_slots: Int[Array, "#B T"]
    key_slots: Int[Array, "#B S"]
    query_segments: Int[Array, "#B T"] | None = None
    key_segments: Int[Array, "#B S"] | None = None
    window: int | None = struct.field(pytree_node=False, default=None)

    def mask(self) -> Bool[Array, "#B T S"]:
        """Mark every (query, key) pair that is visible; the row dimension is 1 when all rows agree."""
        visible = self.key_slots[:, None, :] <= self.query_slots[:, :, None]
        if self.window is not None:
            visible &= self.key_slots[:, None, :] > self.query_slots[:, :, None] - self.window
        if self.query_segments is not None and self.key_segments is not None:
            visible &= self.key_segments[:, None, :] == self.query_segments[:, :, None]
        return visible


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S H"],
    *,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T N H"]:
    """Mix the values of the visible keys by the softmax of their scaled products with the query.

    Query head n reads key/value head n // (N // K). The softmax is float32 whatever the inputs are.

    Args:
        query: Rotated queries.
        key: Rotated keys, heads before slots as the cache stores them.
        value: Values, likewise.
        visibility: Which keys each query reads.
        scale: Factor on the products, usually H ** -0.5.
        softcap: Bound c of the logits, c * tanh(logit / c); None leaves them.
        implementation: "auto" and "xla" are this function.

    Returns:
        The mixed values, in the dtype of `query`.

    Raises:
        ValueError: If the query heads are not a multiple of the key/value heads, or the implementation is unknown.
    """
    num_heads, num_kv_heads = query.shape[2], key.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly. "
            "Choose num_heads as a multiple of num_kv_heads."
        )
    if implementation not in ("auto", "xla"):
        raise ValueError(
            f"attention implementation must be 'auto' or 'xla'. Received: implementation={implementation!r}"
        )
    if query.shape[1] <= DENSE_QUERIES:
        return _dense(query, key, value, visibility, scale, softcap)
    return _chunked(query, key, value, visibility, scale, softcap)


def _dense(query, key, value, visibility, scale, softcap):
    """Attention with all its logits at once."""
    key, value, visibility = _in_reach(query.shape[1], key, value, visibility)
    B, T, N, H = query.shape
    K = key.shape[1]
    query_BTKGH = query.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("BTKGH,BKSH->BKGTS", query_BTKGH, key, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(visibility.mask()[:, None, None], logits, MASKED)
    weights = _softmax(logits).astype(value.dtype)
    if T == 1:
        # einsum would have XLA transpose the cached values at every token; in this order it reads them as they lie.
        batch = (((3,), (2,)), ((0, 1), (0, 1)))
        mixed_BKGH = jax.lax.dot_general(weights.reshape(B, K, N // K, -1), value, batch)
        return mixed_BKGH.reshape(B, T, N, H)
    return jnp.einsum("BKGTS,BKSH->BTKGH", weights, value).reshape(B, T, N, H)


def _in_reach(num_queries, key, value, visibility):
    """Cut the keys down to the slots that a window lets any of the queries read, where that is half of them or less."""
    window, slots = visibility.window, key.shape[2]
    shared = visibility.query_slots.shape[0] == 1 and visibility.key_slots.shape[0] == 1
    if window is None or not shared or 2 * (reach := window + num_queries - 1) > slots:
        return key, value, visibility
    first = jnp.clip(visibility.query_slots[0, 0] - window + 1, 0, slots - reach)

    def cut(x, axis):
        return jax.lax.dynamic_slice_in_dim(x, first, reach, axis)

    segments = None if visibility.key_segments is None else cut(visibility.key_segments, 1)
    visibility = visibility.replace(key_slots=cut(visibility.key_slots, 1), key_segments=segments)
    return cut(key, 2), cut(value, 2), visibility


@jax.custom_jvp
def _softmax(logits: Array) -> Array:
    """Softmax over the last dimension that keeps its result, and nothing else, for the backward pass."""
    exponentials = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    weights = _softmax(*primals)
    change = weights * tangents[0]
    return weights, change - weights * jnp.sum(change, axis=-1, keepdims=True)


def _chunked(query, key, value, visibility, scale, softcap):
    """Attention over chunks of queries, each recomputed in the backward pass: one chunk's logits live at a time."""
    B, T, N, H = query.shape
    num_chunks = -(-T // QUERY_CHUNK)
    padding = num_chunks * QUERY_CHUNK - T

    def chunks(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], num_chunks, QUERY_CHUNK, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(chunk):
        query_chunk, slots, segments = chunk
        rows = visibility.replace(query_slots=slots, query_segments=segments)
        return _dense(query_chunk, key, value, rows, scale, softcap)

    segments = None if visibility.query_segments is None else chunks(visibility.query_segments)
    mixed = jax.lax.map(one, (chunks(query), chunks(visibility.query_slots), segments))
    return jnp.moveaxis(mixed, 0, 1).reshape(B, T + padding, N, H)[:, :T]

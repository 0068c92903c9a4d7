"""Attention by the Pallas kernel of TPUs that skips hidden blocks ("splash attention", part of JAX).

Entry point: `tpu_attention`. What it needs of a call is in `dew.kernels.attention_choice`.
"""

import functools

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

from dew.arrays import Array, Float
from dew.kernels.visibility import Visibility

TILE = 128
"""Queries and keys come in tiles of this many."""
BLOCKS = (512, 256, TILE)
"""Sizes of the kernel's blocks, the first that divides the length."""


def tpu_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S H"],
    visibility: Visibility,
    scale: float,
    softcap: float | None,
    sinks: Float[Array, "N"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Mix values as `dew.kernels.attention.attention` does.

    Args:
        query: Queries; T is a multiple of `TILE`.
        key: Keys; S is a multiple of `TILE`.
        value: Values.
        visibility: Consecutive slots at a distance known when the program is traced.
        scale: Factor on the logits; the kernel has none, so the queries are scaled, in their own dtype.
        softcap: Bound of the logits; None leaves them.
        sinks: A logit per head that joins the denominator.
        interpret: Whether to run the kernel's program operation by operation, on any device.

    Returns:
        The mixed values, in the dtype of `query`.
    """
    B, T, N, _ = query.shape
    S = key.shape[2]
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([_mask(visibility, T, S)] * N),
        block_sizes=_blocks(T, S),
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    segments, mapped = None, None
    if visibility.query_segments is not None and visibility.key_segments is not None:
        rows = max(visibility.query_segments.shape[0], visibility.key_segments.shape[0])
        sides = (visibility.query_segments, visibility.key_segments)
        segments = splash_attention.SegmentIds(*(jax.numpy.broadcast_to(x, (rows, x.shape[1])) for x in sides))
        mapped = 0 if rows == B else None
        segments = segments if mapped == 0 else jax.tree.map(lambda x: x[0], segments)
    run = jax.vmap(functools.partial(_run, kernel), in_axes=(0, 0, 0, mapped, None))
    return run((query * scale).swapaxes(1, 2), key, value, segments, sinks).swapaxes(1, 2)


def _run(kernel, query, key, value, segments, sinks):
    return kernel(query, key, value, segments, sinks)


def _mask(visibility: Visibility, num_queries: int, num_keys: int) -> splash_attention_mask.Mask:
    """Say which keys are visible, as masks that the kernel computes instead of reading."""
    assert visibility.offset is not None, "the choice of kernels asks for the offset"
    shape, offset = (num_queries, num_keys), visibility.offset
    if visibility.chunk is not None:
        return splash_attention_mask.ChunkedCausalMask(shape, visibility.chunk)
    if visibility.window is not None:
        return splash_attention.LocalMask(shape, (visibility.window - 1, 0), offset)
    return splash_attention.CausalMask(shape, offset)


def _blocks(num_queries: int, num_keys: int) -> splash_attention.BlockSizes:
    queries, keys = (next(size for size in BLOCKS if length % size == 0) for length in (num_queries, num_keys))
    return splash_attention.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_kv_compute=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_kv_dkv_compute=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )

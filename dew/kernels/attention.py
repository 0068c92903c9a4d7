"""Scaled dot-product attention on one device, with grouped key/value heads.

Entry points: `attention`; `partial_attention`, `merge` and `partial_gradients` for keys that come in pieces;
`with_sinks`; `one_width` where values are wider or narrower than keys. `Visibility` says which keys a query reads.
"""

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.kernels.attention_choice import AttentionCall, Implementation, attention_choice
from dew.kernels.attention_cudnn import cudnn_attention
from dew.kernels.attention_xla import xla_attention, xla_gradients
from dew.kernels.dropout import AttentionDropout
from dew.kernels.visibility import Visibility, consecutive_visibility

__all__ = [
    "Implementation",
    "Visibility",
    "attention",
    "consecutive_visibility",
    "merge",
    "one_width",
    "partial_attention",
    "partial_gradients",
    "with_sinks",
]


def attention(
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
    """Mix the values of the visible keys by the softmax of their scaled products with the query.

    Query head n reads key/value head n // (N // K). The softmax is float32 whatever the inputs are. A query that
    reads no key gets zeros.

    Args:
        query: Rotated queries.
        key: Rotated keys, heads before slots as the cache stores them.
        value: Values, likewise; their width may be another than that of the keys.
        visibility: Which keys each query reads.
        scale: Factor on the products, usually H ** -0.5.
        softcap: Bound c of the logits, c * tanh(logit / c); None leaves them.
        sinks: A learned logit per query head that joins the softmax's denominator and has no value (gpt-oss).
        implementation: A kernel of `dew.kernels.attention_choice.KERNELS`; "auto" takes the first that can run it.
        dropout: What drops the probabilities of the softmax in training; None drops none.

    Returns:
        The mixed values, in the dtype of `query`.

    Raises:
        ValueError: If the query heads are not a multiple of the key/value heads, or the implementation is unknown or
            cannot run the call.
    """
    _check_heads(query, key)
    call = AttentionCall.of(query, key, visibility, softcap, sinks, value.shape[-1], dropout)
    kernel = attention_choice(call, implementation).kernel
    if kernel != "xla":
        mixed = _compiled(kernel, *one_width(query, key, value), visibility, scale, softcap, sinks)
        return mixed[..., : value.shape[-1]]
    dtype = query.dtype if sinks is None else jnp.dtype(jnp.float32)
    mixed, logsumexp = xla_attention(query, key, value, visibility, scale, softcap, dtype, dropout)
    return mixed if sinks is None else with_sinks(mixed, logsumexp, sinks).astype(query.dtype)


def _compiled(
    kernel: str,
    query: Array,
    key: Array,
    value: Array,
    visibility: Visibility,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    """Run a kernel that takes heads of one width."""
    if kernel == "cudnn":
        return cudnn_attention(query, key, value, visibility, scale)
    from dew.kernels.attention_tpu import tpu_attention  # Pallas takes half a second to import

    return tpu_attention(query, key, value, visibility, scale, softcap, sinks)


def one_width(
    query: Float[Array, "... H"], key: Float[Array, "... H"], value: Float[Array, "... Hv"]
) -> tuple[Array, Array, Array]:
    """Fill up the narrower of keys (with their queries) and values with zeros, which change no product and no mixture.

    Args:
        query: Queries.
        key: Keys.
        value: Values; the first `value.shape[-1]` columns of what is then mixed are theirs.
    """
    width = max(key.shape[-1], value.shape[-1])

    def filled(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]) if x.shape[-1] < width else x

    return filled(query), filled(key), filled(value)


def partial_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    *,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Attend to some of the keys; `merge` joins the results of disjoint keys to attention over all of them.

    Args:
        query: Rotated queries.
        key: Rotated keys of this piece, heads before slots.
        value: Values, likewise.
        visibility: Which keys of this piece each query reads; slots count in the whole sequence.
        scale: Factor on the products.
        softcap: Bound of the logits; None leaves them.
        dropout: As `attention`; the log-sum-exp is that of all logits.

    Returns:
        The mixed values in float32 and the log-sum-exp of the logits in float32: 0 and -1e30 where a query reads no key
        of this piece. Both are differentiable.

    Raises:
        ValueError: If the query heads are not a multiple of the key/value heads.
    """
    _check_heads(query, key)
    return xla_attention(query, key, value, visibility, scale, softcap, jnp.dtype(jnp.float32), dropout)


def partial_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    result: tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]],
    cotangent: tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]],
    *,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S H"], Float[Array, "B K S Hv"]]:
    """Differentiate what some of the keys add to the merged result of all, without mixing their values again.

    A key's weight in the softmax over all keys is exp(logit - L), with L their log-sum-exp. The gradient of its logit
    is this weight times (do . value - do . o + dL), with o the merged values; where dropout drops the weight, and
    divides what it keeps, it does so with do . value too. Five products of queries and keys
    (https://arxiv.org/abs/2307.08691, section 3.1).

    Args:
        query: Rotated queries.
        key: Rotated keys of this piece, heads before slots.
        value: Values, likewise.
        result: The merged mixed values and log-sum-exp over all pieces.
        cotangent: The cotangents of both.
        visibility: Which keys of this piece each query reads.
        scale: Factor on the products.
        softcap: Bound of the logits; None leaves them.
        dropout: What dropped probabilities of this piece.

    Returns:
        The gradients of the queries, of the keys and of the values, each in their dtype.

    Raises:
        ValueError: If the query heads are not a multiple of the key/value heads.
    """
    _check_heads(query, key)
    return xla_gradients(query, key, value, visibility, scale, softcap, result, cotangent, dropout)


def merge(
    first: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]],
    second: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Join two results of `partial_attention` of the same queries over disjoint keys (the online softmax).

    Source: https://arxiv.org/abs/1805.02867; as the pieces of a ring, https://arxiv.org/abs/2310.01889.

    Returns:
        Mixed values and log-sum-exp over the keys of both.
    """
    total = jnp.logaddexp(first[1], second[1])
    shares = [mixed * jnp.exp(logsumexp - total)[..., None] for mixed, logsumexp in (first, second)]
    return shares[0] + shares[1], total


def with_sinks(
    mixed: Float[Array, "B T N H"], logsumexp: Float[Array, "B T N"], sinks: Float[Array, "N"]
) -> Float[Array, "B T N H"]:
    """Let a logit per head join the softmax that mixed the values: its share of the weight goes nowhere.

    Args:
        mixed: Mixed values over all keys, without the sinks.
        logsumexp: Log-sum-exp of their logits.
        sinks: The logit of each head.

    Returns:
        The mixed values, in the dtype of `mixed`.
    """
    return mixed * jax.nn.sigmoid(logsumexp - sinks.astype(jnp.float32))[..., None].astype(mixed.dtype)


def _check_heads(query: Array, key: Array) -> None:
    num_heads, num_kv_heads = query.shape[2], key.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly. "
            "Choose num_heads as a multiple of num_kv_heads."
        )

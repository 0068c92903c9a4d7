"""Attention over pieces of the keys joins to attention over all, as do their gradients; sinks, chunks and any slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.kernels import attention_blocks, attention_xla
from dew.kernels.attention import (
    Visibility,
    attention,
    consecutive_visibility,
    merge,
    partial_attention,
    partial_gradients,
)
from dew.kernels.dropout import AttentionDropout, fold, keeps

B, T, S, N, K, H = 2, 6, 12, 4, 2, 8
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3]])
STRIPE = jnp.array([1, 2, 3, 8, 9, 10])  # queries of two stretches of a sequence
SINKS = jnp.array([0.5, -1.0, 2.0, -3.0])
DROPOUT = AttentionDropout(words=(jnp.uint32(1), jnp.uint32(2)), rows=jnp.array([5, 2]), heads=jnp.arange(N), rate=0.3)


def heads(num_queries=T, num_keys=S):
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (B, num_queries, N, H))
    return query, *(jax.random.normal(key, (B, K, num_keys, H)) for key in keys[1:])


def plain(query, key, value, allowed, sinks=None, scale=0.5, softcap=None, factors=1.0):
    """Give softmax attention and the log-sum-exp, written out; rows that read nothing are zero and -inf."""
    key, value = (jnp.repeat(x, N // K, axis=1) for x in (key, value))
    logits = jnp.einsum("BTNH,BNSH->BNTS", query, key) * scale
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(allowed[:, None], logits, -jnp.inf)
    extra = jnp.full((B, N, query.shape[1], 1), -jnp.inf) if sinks is None else None
    if extra is None:
        extra = jnp.broadcast_to(sinks[None, :, None, None], (B, N, query.shape[1], 1))
    every = jnp.concatenate([logits, extra], axis=-1)
    highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(every, axis=-1, keepdims=True), -1e30))
    total = jnp.sum(jnp.exp(every - highest), axis=-1, keepdims=True)
    weights = jnp.exp(logits - highest) / jnp.where(total > 0, total, 1)
    logsumexp = highest + jnp.log(jnp.where(total > 0, total, 1))
    return jnp.einsum("BNTS,BNSH->BTNH", weights * factors, value), logsumexp[..., 0].swapaxes(1, 2)


def allowed_pairs(query_slots, key_slots, query_segments, key_segments, window=None, chunk=None):
    pairs = np.zeros((B, len(query_slots), len(key_slots)), bool)
    for b, t, s in np.ndindex(pairs.shape):
        q, k = int(query_slots[t]), int(key_slots[s])
        pairs[b, t, s] = k <= q and int(query_segments[b, t]) == int(key_segments[b, s])
        pairs[b, t, s] &= (window is None or q - k < window) and (chunk is None or q // chunk == k // chunk)
    return jnp.asarray(pairs)


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)


@pytest.fixture(params=["at once", "in blocks"], autouse=True)
def form(request, monkeypatch):
    if request.param == "in blocks":  # blocks that do not divide the lengths
        monkeypatch.setattr(attention_xla, "DENSE_QUERIES", 1)
        monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", 4)
        monkeypatch.setattr(attention_blocks, "KEY_BLOCK", 5)
    return request.param


@pytest.mark.parametrize("limits", [{}, {"window": 3}, {"chunk": 4}, {"window": 3, "chunk": 4}], ids=str)
@pytest.mark.parametrize("slots", [STRIPE, jnp.arange(6, 12)], ids=["stripe", "consecutive"])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_it_is_its_formula_for_any_slots(limits, slots, sinks):
    inputs = heads()
    visibility = Visibility(slots[None], jnp.arange(S)[None], SEGMENTS[:, slots], SEGMENTS, **limits)
    if slots is not STRIPE:
        visibility = visibility.replace(consecutive=True, offset=6)
    allowed = allowed_pairs(slots, jnp.arange(S), SEGMENTS[:, slots], SEGMENTS, **limits)

    def loss(of):
        return lambda heads, sinks: jnp.sum(jnp.sin(of(*heads, sinks)))

    def ours(query, key, value, sinks):
        return attention(query, key, value, visibility=visibility, scale=0.5, sinks=sinks)

    want = jax.value_and_grad(loss(lambda *x: plain(*x[:3], allowed, x[3])[0]), (0, 1))(inputs, sinks)
    close(jax.value_and_grad(loss(ours), (0, 1))(inputs, sinks), want)


@pytest.mark.parametrize("limits", [{}, {"window": 3}, {"chunk": 4}], ids=str)
def test_pieces_of_the_keys_merge_to_attention_over_all_of_them(limits):
    inputs = heads()
    query_segments = SEGMENTS[:, STRIPE]
    allowed = allowed_pairs(STRIPE, jnp.arange(S), query_segments, SEGMENTS, **limits)

    def pieces(query, key, value):
        joined = None
        for start in (8, 0, 4):  # a ring meets its pieces in any order; some queries read nothing of the first
            piece = slice(start, start + 4)
            visibility = Visibility(
                STRIPE[None], start + jnp.arange(4)[None], query_segments, SEGMENTS[:, piece], **limits
            )
            part = partial_attention(query, key[:, :, piece], value[:, :, piece], visibility=visibility, scale=0.5)
            joined = part if joined is None else merge(joined, part)
        return joined

    def loss(of):
        def total(*heads):
            mixed, logsumexp = of(*heads)
            return jnp.sum(jnp.sin(mixed)) + jnp.sum(jnp.cos(logsumexp)), (mixed, logsumexp)

        return total

    want = jax.value_and_grad(loss(lambda *x: plain(*x, allowed)), (0, 1, 2), has_aux=True)(*inputs)
    got = jax.value_and_grad(loss(pieces), (0, 1, 2), has_aux=True)(*inputs)
    assert got[0][1][0].dtype == got[0][1][1].dtype == jnp.float32
    close(got, want)


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("limits", [{}, {"window": 3}, {"chunk": 4}], ids=str)
def test_gradients_of_pieces_join_to_those_of_all_keys(limits, softcap, dropout):
    query, key, value = heads()
    value = value[..., :5]
    query_segments = SEGMENTS[:, STRIPE].at[0, 1].set(9)  # this query reads nothing
    allowed = allowed_pairs(STRIPE, jnp.arange(S), query_segments, SEGMENTS, **limits)
    rows, numbers, queries, slots = np.indices((B, N, T, S))
    words = fold(fold(DROPOUT.words, DROPOUT.rows[rows], numbers), STRIPE[queries], slots)
    factors = 1.0 if dropout is None else jnp.where(keeps(words, 0.3), 1 / 0.7, 0)

    def pieces():
        for start in (8, 0, 4):
            visibility = Visibility(
                STRIPE[None], start + jnp.arange(4)[None], query_segments, SEGMENTS[:, start : start + 4], **limits
            )
            options = {"visibility": visibility, "scale": 0.5, "softcap": softcap, "dropout": dropout}
            yield start, (key[:, :, start : start + 4], value[:, :, start : start + 4]), options

    parts = [partial_attention(query, *pairs, **options) for _, pairs, options in pieces()]
    result = merge(merge(*parts[:2]), parts[2])
    want, pull = jax.vjp(lambda *heads: plain(*heads, allowed, softcap=softcap, factors=factors), *(query, key, value))
    close(result, want)
    cotangent = jnp.cos(want[0]), jnp.sin(want[1])
    by_query, by_keys = jnp.zeros_like(query), {}
    for start, pairs, options in pieces():
        added, *by_keys[start] = partial_gradients(query, *pairs, result, cotangent, **options)
        by_query += added
    by_key, by_value = (jnp.concatenate([by_keys[start][i] for start in (0, 4, 8)], axis=2) for i in range(2))
    assert not np.any(by_query[0, 1])
    close((by_query, by_key, by_value), pull(cotangent))


def test_a_row_that_reads_nothing_is_zero_and_has_no_share_in_a_merge():
    query, key, value = heads()
    hidden = consecutive_visibility(T, S, query_start=0, key_start=100)

    def partial(query, key, value):
        return partial_attention(query, key, value, visibility=hidden, scale=1.0)

    mixed, logsumexp = partial(query, key, value)
    assert not np.any(mixed)
    assert np.all(logsumexp < -1e29)
    assert not np.any(attention(query, key, value, visibility=hidden, scale=1.0, sinks=SINKS))
    gradients = jax.grad(lambda *x: sum(jnp.sum(part) for part in merge(partial(*x), partial(*x))), (0, 1, 2))
    assert not any(np.any(gradient) for gradient in gradients(query, key, value))


@pytest.mark.parametrize("limits", [{"window": 2}, {"chunk": 2}], ids=str)
def test_stretches_far_apart_read_their_own_ends_of_the_keys(limits):
    slots = jnp.array([1, 2, 30, 31])  # were they consecutive, five keys of 32 would do
    query, key, value = heads(num_queries=4, num_keys=32)
    one = jnp.ones((B, 32), int)
    want = plain(query, key, value, allowed_pairs(slots, np.arange(32), one[:, :4], one, **limits))
    visibility = Visibility(slots[None], jnp.arange(32)[None], **limits)
    close(partial_attention(query, key, value, visibility=visibility, scale=0.5), want)


def test_a_row_of_a_document_without_keys_gives_no_gradient():
    inputs = heads()
    query_segments, key_segments = jnp.ones((B, T), jnp.int32).at[:, 2].set(9), jnp.ones((B, S), jnp.int32)
    visibility = consecutive_visibility(T, S, query_start=6, query_segments=query_segments, key_segments=key_segments)
    allowed = allowed_pairs(np.arange(6, 12), np.arange(S), query_segments, key_segments)

    def gradients(of):
        return jax.grad(lambda *heads: jnp.sum(jnp.cos(of(*heads) + 1.0)), (0, 1, 2))(*inputs)

    got = gradients(lambda *heads: attention(*heads, visibility=visibility, scale=0.5))
    close(got, gradients(lambda *heads: plain(*heads, allowed)[0]))


@pytest.mark.parametrize("limits", [{}, {"window": 2}, {"chunk": 3}], ids=str)
@pytest.mark.parametrize("start, key_start", [(7, 0), (4, 2), (0, 5)])
def test_an_offset_may_be_known_only_when_the_program_runs(limits, start, key_start):
    query, key, value = heads(num_queries=2)

    @jax.jit
    def traced(start, key_start):
        visibility = consecutive_visibility(2, S, query_start=start, key_start=key_start, **limits)
        assert visibility.offset is None
        return partial_attention(query, key, value, visibility=visibility, scale=0.5)

    static = consecutive_visibility(2, S, query_start=start, key_start=key_start, **limits)
    assert static.offset == start - key_start
    one = jnp.ones((B, S), int)
    allowed = allowed_pairs(start + np.arange(2), key_start + np.arange(S), one[:, :2], one, **limits)
    want = plain(query, key, value, allowed)
    close(traced(start, key_start), want)
    close(partial_attention(query, key, value, visibility=static, scale=0.5), want)


def test_an_offset_without_consecutive_slots_is_refused():
    with pytest.raises(ValueError, match=r"Pass consecutive=True too\. Received: offset=3"):
        Visibility(STRIPE[None], STRIPE[None], offset=3)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_narrow_inputs_give_what_wide_ones_give(sinks):
    wide = heads()
    narrow = tuple(x.astype(jnp.bfloat16) for x in wide)
    visibility = consecutive_visibility(T, S, query_start=6)

    def of_both(query, key, value):
        mixed = attention(query, key, value, visibility=visibility, scale=0.5, sinks=sinks)
        part, logsumexp = partial_attention(query, key, value, visibility=visibility, scale=0.5)
        assert (mixed.dtype, part.dtype, logsumexp.dtype) == (query.dtype, jnp.float32, jnp.float32)
        return mixed.astype(jnp.float32), part, logsumexp

    def gradients(inputs):
        return jax.jit(jax.grad(lambda *x: sum(jnp.sum(jnp.sin(part)) for part in of_both(*x)), (0, 1, 2)))(*inputs)

    def of_piece(query, key, value):
        result = partial_attention(query, key, value, visibility=visibility, scale=0.5)
        cotangent = jnp.cos(result[0]), jnp.sin(result[1])
        found = partial_gradients(query, key, value, result, cotangent, visibility=visibility, scale=0.5)
        assert all(x.dtype == query.dtype for x in found)
        return found

    found = [(of(narrow), of(wide)) for of in (lambda x: of_both(*x), gradients, lambda x: jax.jit(of_piece)(*x))]
    for got, want in found:
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=0.03 * float(jnp.max(jnp.abs(b))))

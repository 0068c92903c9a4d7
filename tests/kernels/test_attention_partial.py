"""Attention over pieces of the keys joins to attention over all; sinks, chunks and any slots are their formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.kernels import attention_blocks, attention_xla
from dew.kernels.attention import Visibility, attention, consecutive_visibility, merge, partial_attention

B, T, S, N, K, H = 2, 6, 12, 4, 2, 8
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3]])
STRIPE = jnp.array([1, 2, 3, 8, 9, 10])  # queries of two stretches of a sequence
SINKS = jnp.array([0.5, -1.0, 2.0, -3.0])


def heads(num_queries=T, num_keys=S):
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (B, num_queries, N, H))
    return query, *(jax.random.normal(key, (B, K, num_keys, H)) for key in keys[1:])


def plain(query, key, value, allowed, sinks=None, scale=0.5):
    """Give softmax attention and the log-sum-exp, written out; rows that read nothing are zero and -inf."""
    key, value = (jnp.repeat(x, N // K, axis=1) for x in (key, value))
    logits = jnp.where(allowed[:, None], jnp.einsum("BTNH,BNSH->BNTS", query, key) * scale, -jnp.inf)
    extra = jnp.full((B, N, query.shape[1], 1), -jnp.inf) if sinks is None else None
    if extra is None:
        extra = jnp.broadcast_to(sinks[None, :, None, None], (B, N, query.shape[1], 1))
    every = jnp.concatenate([logits, extra], axis=-1)
    highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(every, axis=-1, keepdims=True), -1e30))
    total = jnp.sum(jnp.exp(every - highest), axis=-1, keepdims=True)
    weights = jnp.exp(logits - highest) / jnp.where(total > 0, total, 1)
    logsumexp = highest + jnp.log(jnp.where(total > 0, total, 1))
    return jnp.einsum("BNTS,BNSH->BTNH", weights, value), logsumexp[..., 0].swapaxes(1, 2)


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

    for got, want in [(of_both(*narrow), of_both(*wide)), (gradients(narrow), gradients(wide))]:
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=0.03 * float(jnp.max(jnp.abs(b))))

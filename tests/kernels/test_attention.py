"""Attention equals a loop over every query, key and head; chunks and segments change nothing they should not."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.kernels import attention_blocks, attention_xla
from dew.kernels.attention import Visibility, attention, consecutive_visibility, one_width
from dew.kernels.dropout import AttentionDropout, fold, keeps
from dew.nn.masks import cached_visibility, causal_visibility

B, T, N, K, H = 2, 9, 4, 2, 8


def heads(seed, length=T, num_heads=N, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    query = jax.random.normal(keys[0], (B, length, num_heads, H), dtype)
    return query, *(jax.random.normal(key, (B, K, length, H), dtype) for key in keys[1:])


def blocks(monkeypatch, queries, keys):
    monkeypatch.setattr(attention_xla, "DENSE_QUERIES", 1)
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", queries)
    monkeypatch.setattr(attention_blocks, "KEY_BLOCK", keys)


def by_loop(query, key, value, allowed, scale, softcap=None):
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros(query.shape)
    for b, t, n in np.ndindex(query.shape[:3]):
        kv = n // (query.shape[2] // key.shape[1])
        read = [s for s in range(key.shape[2]) if allowed[b][t][s]]
        logits = [scale * query[b, t, n] @ key[b, kv, s] for s in read]
        if softcap is not None:
            logits = [softcap * math.tanh(logit / softcap) for logit in logits]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        out[b, t, n] = sum(w * value[b, kv, s] for w, s in zip(weights, read, strict=True)) / sum(weights)
    return out


def causal(segments=None):
    if segments is None:
        return [[[s <= t for s in range(T)] for t in range(T)] for _ in range(B)]
    return [[[s <= t and row[s] == row[t] for s in range(T)] for t in range(T)] for row in np.asarray(segments)]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("segments", [None, [[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3, 3, 3, 3]]])
def test_it_is_the_loop_over_queries_keys_and_heads(segments, softcap):
    query, key, value = heads(0)
    visibility = causal_visibility(T, None if segments is None else jnp.array(segments))
    got = attention(query, key, value, visibility=visibility, scale=0.7, softcap=softcap)
    np.testing.assert_allclose(got, by_loop(query, key, value, causal(segments), 0.7, softcap), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("segments", [None, [[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3, 3, 3, 3]]])
def test_blocks_give_the_same_values_and_gradients(monkeypatch, segments):
    inputs = heads(1)
    visibility = causal_visibility(T, None if segments is None else jnp.array(segments))

    def loss(query, key, value):
        return jnp.sum(jnp.sin(attention(query, key, value, visibility=visibility, scale=0.5)))

    want = jax.value_and_grad(loss, (0, 1, 2))(*inputs)
    blocks(monkeypatch, 4, 2)  # 9 queries and keys: the last blocks are filled up
    got = jax.value_and_grad(loss, (0, 1, 2))(*inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


DROPOUT = AttentionDropout(words=(jnp.uint32(1), jnp.uint32(2)), rows=jnp.array([5, 2]), heads=jnp.arange(N), rate=0.3)


def factors():
    """What each probability is multiplied by, from its row, head, query and key alone."""
    rows, heads, queries, keys = np.indices((B, N, T, T))
    words = fold(fold(DROPOUT.words, DROPOUT.rows[rows], heads), queries, keys)
    return jnp.where(keeps(words, DROPOUT.rate), 1 / (1 - DROPOUT.rate), 0)


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("block", [None, 4], ids=["at once", "in blocks"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_its_gradients_are_those_of_plain_softmax_attention(monkeypatch, softcap, block, dropout):
    if block:
        blocks(monkeypatch, block, 2)
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3, 3, 3, 3]])
    visibility = causal_visibility(T, segments)

    def ours(query, key, value):
        options = {"visibility": visibility, "scale": 0.5, "softcap": softcap, "dropout": dropout}
        return jnp.sum(jnp.sin(attention(query, key, value, **options)))

    def plain(query, key, value):
        key, value = (jnp.repeat(x, N // K, axis=1) for x in (key, value))
        logits = jnp.einsum("BTNH,BNSH->BNTS", query, key) * 0.5
        logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        allowed = jnp.tril(jnp.ones((T, T), bool)) & (segments[:, :, None] == segments[:, None, :])
        weights = jax.nn.softmax(jnp.where(allowed[:, None], logits, -jnp.inf))
        weights = weights if dropout is None else weights * factors()
        return jnp.sum(jnp.sin(jnp.einsum("BNTS,BNSH->BTNH", weights, value)))

    (total, got), (want_total, want) = (jax.value_and_grad(loss, (0, 1, 2))(*heads(6)) for loss in (ours, plain))
    np.testing.assert_allclose(total, want_total, rtol=1e-5)
    for gradient, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-6 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("options", [{}, {"window": 1024}], ids=str)
def test_long_rows_take_an_eighth_of_the_memory_of_all_their_logits(monkeypatch, options):
    length, num_keys = 4096, 2
    query, key, value = (
        jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        for shape in [(length, num_keys, H), *[(num_keys, length, H)] * 2]
    )
    visibility = causal_visibility(length).replace(**options)

    def temporaries():
        def loss(query, key, value):
            return jnp.sum(attention(query, key, value, visibility=visibility, scale=1.0))

        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, value).compile()
        return program.memory_analysis().temp_size_in_bytes

    in_blocks = temporaries()
    monkeypatch.setattr(attention_xla, "DENSE_QUERIES", length)
    assert 8 * in_blocks < temporaries()


@pytest.mark.parametrize(
    "limits, query_start, read",
    [({}, 0, range(12)), ({}, 4, range(16)), ({"window": 3}, 8, range(6, 20)), ({"chunk": 8}, 9, range(8, 22))],
    ids=str,
)
def test_keys_beyond_reach_are_not_even_read(monkeypatch, limits, query_start, read):
    blocks(monkeypatch, 4, 2)
    query, key, value = heads(9, length=32)
    # 12 queries. Weights of zero would still make NaN of a NaN: it stays out where its block is never visited.
    beyond = jnp.array([slot not in read for slot in range(32)])
    key, value = (jnp.where(beyond[:, None], jnp.nan, x) for x in (key, value))
    visibility = consecutive_visibility(12, 32, query_start=query_start, **limits)

    def loss(query, key, value):
        return jnp.sum(jnp.sin(attention(query, key, value, visibility=visibility, scale=1.0)))

    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(query[:, :12], key, value)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in (value, *gradients))


def test_a_new_token_reads_the_cache_up_to_itself_and_no_padding():
    query, key, value = heads(2)
    valid = jnp.array([[True] * T, [False, False] + [True] * (T - 2)])
    index = 6
    got = attention(query[:, :2], key, value, visibility=cached_visibility(jnp.int32(index), 2, valid), scale=1.0)
    allowed = [[[bool(valid[b, s]) and s <= index + t for s in range(T)] for t in range(2)] for b in range(B)]
    np.testing.assert_allclose(got, by_loop(query[:, :2], key, value, allowed, 1.0), rtol=2e-5, atol=2e-6)


def windowed(allowed, window):
    return [[[read and s > t - window for s, read in enumerate(row)] for t, row in enumerate(rows)] for rows in allowed]


@pytest.mark.parametrize("window", [1, 3, 9])
@pytest.mark.parametrize("segments", [None, [[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3, 3, 3, 3]]])
@pytest.mark.parametrize("block", [None, 2], ids=["at once", "in blocks"])
def test_a_window_of_w_keys_is_the_loop_over_them(monkeypatch, window, segments, block):
    if block is not None:
        blocks(monkeypatch, block, block)
    visibility = causal_visibility(T, None if segments is None else jnp.array(segments)).replace(window=window)
    got = attention(*heads(7), visibility=visibility, scale=0.7)
    want = by_loop(*heads(7), windowed(causal(segments), window), 0.7)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("index", [0, 2, 5, 8])
def test_a_new_token_with_a_window_reads_its_end_of_the_cache(index):
    query, key, value = heads(8)
    valid = jnp.array([[True] * T, [False, False] + [True] * (T - 2)])
    visibility = cached_visibility(jnp.int32(index), 1, valid).replace(window=4)
    row = [[bool(valid[b, s]) and index - 4 < s <= index for s in range(T)] for b in range(B)]
    got = attention(query[:, :1], key, value, visibility=visibility, scale=1.0)
    readable = [b for b in range(B) if any(row[b])]
    for b in readable:
        want = by_loop(query[b : b + 1, :1], key[b : b + 1], value[b : b + 1], [[row[b]]], 1.0)
        np.testing.assert_allclose(got[b : b + 1], want, rtol=2e-5, atol=2e-6)
    assert readable


def test_a_query_that_may_read_nothing_stays_finite():
    query, key, value = heads(3)
    slots = jnp.arange(T)[None]
    nothing = Visibility(
        query_slots=slots, key_slots=slots, query_segments=jnp.ones((1, T), int), key_segments=jnp.zeros((1, T), int)
    )
    out, gradient = jax.value_and_grad(
        lambda query: jnp.sum(attention(query, key, value, visibility=nothing, scale=1.0))
    )(query)
    assert np.isfinite(out)
    assert np.isfinite(gradient).all()


def test_bfloat16_heads_have_a_float32_softmax():
    query, key, value = heads(4, dtype=jnp.bfloat16)
    got = attention(query, key, value, visibility=causal_visibility(T), scale=1.0)
    assert got.dtype == jnp.bfloat16
    # One rounding of the weights and one of the result; a softmax in bfloat16 is off by several times as much.
    np.testing.assert_allclose(got.astype(jnp.float32), by_loop(query, key, value, causal(), 1.0), atol=1.5e-2)


@pytest.mark.parametrize("width", [3, 12])
def test_values_of_another_width_are_those_columns_alone(monkeypatch, width):
    query, key, value = heads(8)
    value = jnp.concatenate([value, 2 * value], axis=-1)[..., :width]
    visibility = causal_visibility(T)

    def loss(query, key, value):
        mixed = attention(query, key, value, visibility=visibility, scale=0.5)
        assert mixed.shape == (B, T, N, width)
        return jnp.sum(jnp.sin(mixed))

    def by_columns(query, key, value):
        columns = [jnp.broadcast_to(value[..., [column]], key.shape) for column in range(width)]
        mixed = [attention(query, key, each, visibility=visibility, scale=0.5)[..., :1] for each in columns]
        return sum(jnp.sum(jnp.sin(each)) for each in mixed)

    want = jax.value_and_grad(by_columns, (0, 1, 2))(query, key, value)
    filled = one_width(query, key, value)
    assert {x.shape[-1] for x in filled} == {max(H, width)}
    same = attention(*filled, visibility=visibility, scale=0.5)
    np.testing.assert_allclose(
        same[..., :width], attention(query, key, value, visibility=visibility, scale=0.5), rtol=1e-6
    )
    for size in (T, 4):
        if size < T:
            blocks(monkeypatch, size, 2)
        got = jax.value_and_grad(loss, (0, 1, 2))(query, key, value)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_heads_that_do_not_share_evenly_are_refused():
    query, key, value = heads(5, num_heads=3)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key/value heads"):
        attention(query, key, value, visibility=causal_visibility(T), scale=1.0)

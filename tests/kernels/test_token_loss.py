"""The chunked cross entropy equals the plain one, values and gradients, without ever holding all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.kernels import token_loss as kernel
from dew.kernels.token_loss import token_cross_entropy, token_loss

T, D, V = 30, 16, 41


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (T, D)).astype(dtype)
    head = jax.random.normal(keys[1], (V, D))
    targets = jax.random.randint(keys[2], (T,), 0, V)
    weights = jax.random.uniform(keys[3], (T,)) * (jnp.arange(T) % 3 > 0)
    return hidden, head, targets, weights


def plain(hidden, head, targets, weights, softcap=None, scale=1.0):
    logits = scale * (hidden @ head.T)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=-1)[:, 0]
    return jnp.sum(losses * weights), jnp.sum((jnp.argmax(logits, axis=-1) == targets) * weights)


@pytest.mark.parametrize("tokens_in_a_chunk", [T, 7, 1])
@pytest.mark.parametrize("softcap, scale", [(None, 1.0), (5.0, 0.5)])
def test_it_is_the_plain_cross_entropy(monkeypatch, tokens_in_a_chunk, softcap, scale):
    monkeypatch.setattr(kernel, "CHUNK_BYTES", tokens_in_a_chunk * V * 4)
    hidden, head, targets, weights = inputs()

    def ours(hidden, head):
        return token_cross_entropy(hidden, head, targets, weights, softcap=softcap, scale=scale)

    def reference(hidden, head):
        return plain(hidden, head, targets, weights, softcap, scale)

    (loss, correct), gradients = jax.value_and_grad(ours, (0, 1), has_aux=True)(hidden, head)
    (want, want_correct), want_gradients = jax.value_and_grad(reference, (0, 1), has_aux=True)(hidden, head)
    np.testing.assert_allclose([loss, *ours(hidden, head)], [want, want, want_correct], rtol=1e-6)
    np.testing.assert_allclose(correct, want_correct, rtol=1e-6)
    for got, gradient in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, gradient, rtol=0, atol=1e-6 * float(jnp.max(jnp.abs(gradient))))


def test_a_factor_on_the_loss_is_a_factor_on_its_gradients():
    hidden, head, targets, weights = inputs()

    def ours(factor):
        return jax.grad(lambda h, w: factor * token_cross_entropy(h, w, targets, weights)[0], (0, 1))(hidden, head)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -3 * b, rtol=1e-6), ours(-3.0), ours(1.0))


def test_a_token_without_weight_costs_nothing_even_when_its_loss_is_infinite():
    hidden, head, targets, weights = inputs()
    assert weights[0] == 0
    loss, _ = token_loss(hidden.at[0].set(jnp.inf), head, targets, weights)
    np.testing.assert_allclose(loss, token_loss(hidden, head, targets, weights)[0], rtol=1e-6)
    assert token_loss(hidden, head, targets, jnp.zeros(T))[0] == 0


def test_the_gradient_takes_three_products_and_one_chunk_of_logits(monkeypatch):
    monkeypatch.setattr(kernel, "CHUNK_BYTES", 10 * V * 4)
    hidden, head, targets, weights = inputs()
    program = jax.make_jaxpr(jax.grad(lambda h, w: token_cross_entropy(h, w, targets, weights)[0], (0, 1)))(
        hidden, head
    )
    text = str(program)
    assert text.count("dot_general") == 3
    assert f"[10,{V}]" in text
    assert f"[{T},{V}]" not in text


def test_bfloat16_hidden_states_leave_a_float32_gradient_of_a_float32_head():
    hidden, head, targets, weights = inputs(jnp.bfloat16)
    by_hidden, by_head = jax.grad(lambda h, w: token_cross_entropy(h, w, targets, weights)[0], (0, 1))(hidden, head)
    assert (by_hidden.dtype, by_head.dtype) == (jnp.bfloat16, jnp.float32)
    wide, narrow = hidden.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32)
    want = jax.grad(lambda w: plain(wide, w, targets, weights)[0])(narrow)
    np.testing.assert_allclose(by_head, want, atol=1e-2 * float(jnp.max(jnp.abs(want))))

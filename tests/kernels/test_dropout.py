"""Dropout: shares and means, and masks that follow from a key and the place of a number alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.kernels.dropout import MIXER, MLP, Dropout, checked_rate, fold

B, T, D = 8, 16, 64
ONES = jnp.ones((B, T, D))


def drops(rate, key=0, rows=B):
    return Dropout.of_batch(jax.random.key(key), rows, embedding_rate=rate, residual_rate=rate)


def assert_share(mask, rate):
    """Five standard deviations of a binomial: one correct mask in two million fails."""
    assert abs(np.mean(mask) - rate) < 5 * np.sqrt(rate * (1 - rate) / mask.size)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_share_of_the_numbers_is_zero_and_the_rest_keeps_the_mean(rate):
    got = np.asarray(drops(rate).of_layer(3).of_residual(ONES, MLP))
    assert_share(got == 0, rate)
    np.testing.assert_allclose(got[got != 0], 1 / (1 - rate), rtol=1e-6)
    assert abs(got.mean() - 1) < 5 * np.sqrt(rate / (1 - rate) / got.size)
    for axis in itertools.combinations(range(3), 2):  # no row, position or feature is favoured
        shares = np.mean(got == 0, axis=axis)
        assert np.max(np.abs(shares - rate)) < 6 * np.sqrt(rate * (1 - rate) * shares.size / got.size)


def masks():
    """Draw a mask at every place that should have its own."""
    step, other = drops(0.5), drops(0.5, key=1)
    found = {"embeddings": step.of_embeddings(ONES), "another step": other.of_embeddings(ONES)}
    for layer, (name, site) in itertools.product((0, 1, 7), {"mixer": MIXER, "mlp": MLP}.items()):
        found[f"{name} of layer {layer}"] = step.of_layer(layer).of_residual(ONES, site)
    return {name: np.asarray(mask) == 0 for name, mask in found.items()}


def test_steps_layers_and_sites_have_masks_of_their_own():
    for one, other in itertools.combinations(masks().values(), 2):
        assert_share(one == other, 0.5)


def test_rows_positions_and_features_have_masks_of_their_own():
    for mask in masks().values():
        for axis in range(3):
            assert_share(mask == np.roll(mask, 1, axis), 0.5)


def test_a_row_has_its_mask_wherever_it_is_computed():
    whole = drops(0.3)
    want = whole.of_layer(2).of_residual(ONES, MIXER)
    part = whole.replace(rows=whole.rows[1::4])
    np.testing.assert_array_equal(part.of_layer(2).of_residual(ONES[1::4], MIXER), want[1::4])


def test_layers_that_are_mapped_or_scanned_have_the_masks_of_each():
    step = drops(0.3)
    want = [step.of_layer(layer).of_residual(ONES, MLP) for layer in range(4)]
    draw = jax.jit(lambda number: step.of_layer(number).of_residual(ONES, MLP))
    np.testing.assert_array_equal(jax.vmap(draw)(jnp.arange(4)), want)
    np.testing.assert_array_equal(jax.lax.map(draw, jnp.arange(4)), want)


def test_gradients_pass_where_numbers_are_kept():
    def total(x):
        return jnp.sum(drops(0.3).of_embeddings(x) * jnp.arange(D))

    scale = drops(0.3).of_embeddings(ONES)
    np.testing.assert_allclose(jax.grad(total)(ONES), scale * jnp.arange(D), rtol=1e-6)


def test_narrow_numbers_are_divided_in_float32():
    x = jnp.full((B, T, D), 0.9, jnp.bfloat16)
    got = drops(0.1).of_embeddings(x)
    assert got.dtype == jnp.bfloat16
    want = np.asarray(x[0, 0, 0], np.float32) / 0.9
    np.testing.assert_array_equal(np.unique(np.asarray(got, np.float32)), [0, np.asarray(jnp.bfloat16(want))])


def test_counters_are_taken_modulo_the_words():
    words = jnp.uint32(1), jnp.uint32(2)
    np.testing.assert_array_equal(fold(words, jnp.int32(-1), 5), fold(words, jnp.uint32(2**32 - 1), 5))


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, float("nan"), True, "0.1", None])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match=r"a_rate must be from 0 up to 1. Received: a_rate="):
        checked_rate("a_rate", rate)

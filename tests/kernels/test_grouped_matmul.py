"""Grouped products equal a plain loop over the groups, values and gradients, in both forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.kernels.grouped_matmul import block_rows, grouped_matmul

R, D, F = 70, 12, 20
SIZES = {
    "uneven": [9, 0, 33, 1, 27],
    "rows behind the last group": [5, 20, 0, 0, 12],
    "all in one": [0, 0, 70, 0, 0],
    "nothing": [0, 0, 0, 0, 0],
}


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    rows, banks = jax.random.normal(keys[0], (R, D)), jax.random.normal(keys[1], (5, D, F))
    return rows.astype(dtype), banks.astype(dtype), jax.random.normal(keys[2], (R, F)).astype(dtype)


def by_loop(rows, banks, sizes):
    parts, start = [], 0
    for matrix, size in zip(banks, sizes, strict=True):
        parts.append(rows[start : start + size] @ matrix)
        start += size
    return jnp.concatenate([*parts, jnp.zeros((R - start, F), rows.dtype)])


@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
@pytest.mark.parametrize("name", SIZES)
def test_it_is_a_loop_over_the_groups(name, implementation):
    rows, banks, weights = inputs()
    sizes = jnp.array(SIZES[name])

    def ours(rows, banks):
        out = grouped_matmul(rows, banks, sizes, implementation=implementation)
        return jnp.sum(out * weights), out

    def loop(rows, banks):
        out = by_loop(rows, banks, SIZES[name])
        return jnp.sum(out * weights), out

    got, (by_rows, by_banks) = ours(rows, banks)[1], jax.jit(jax.grad(ours, (0, 1), has_aux=True))(rows, banks)[0]
    want, want_gradients = loop(rows, banks)[1], jax.grad(loop, (0, 1), has_aux=True)(rows, banks)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_rows, want_gradients[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_banks, want_gradients[1], rtol=1e-5, atol=1e-5)


def test_sums_are_float32_whatever_the_rows_are():
    rows, banks, weights = inputs(jnp.bfloat16)
    sizes = jnp.array(SIZES["uneven"])
    wide = by_loop(rows.astype(jnp.float32), banks.astype(jnp.float32), SIZES["uneven"])
    got = grouped_matmul(rows, banks, sizes)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), wide.astype(jnp.bfloat16).astype(jnp.float32))
    gradient = jax.grad(lambda banks: jnp.sum((grouped_matmul(rows, banks, sizes) * weights).astype(jnp.float32)))
    assert gradient(banks).dtype == jnp.bfloat16


def test_the_work_of_the_loop_follows_the_rows():
    assert block_rows(4096, 8) == 128
    assert block_rows(100, 8) == 16
    assert block_rows(2, 64) == 8


def test_an_unknown_implementation_is_refused():
    rows, banks, _ = inputs()
    with pytest.raises(ValueError, match=r"one of auto, ragged, blocks\. Received: implementation='dense'"):
        grouped_matmul(rows, banks, jnp.array(SIZES["uneven"]), implementation="dense")

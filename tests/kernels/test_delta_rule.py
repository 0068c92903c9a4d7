"""The delta rule in chunks is the recurrence: outputs, states and gradients, wherever documents and chunks end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.kernels.delta_rule import delta_rule, delta_rule_step, unit
from tests.kernels import slow_delta_rule

N, H, G, P = 4, 3, 2, 5
ROWS = 2
LENGTH = 70
NAMES = ("v", "k", "q", "log_decay", "beta")


def drawn(seed, length=LENGTH, keys=G, alike=0.0):
    """Inputs, some heads forgetting within a token or two and others hardly ever; keys may be nearly all alike."""
    generator = np.random.default_rng(seed)
    shapes = {"v": (ROWS, length, N, H), "k": (ROWS, length, keys, P), "q": (ROWS, length, keys, P)}
    inputs = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    inputs["k"] = slow_delta_rule.unit((1 - alike) * inputs["k"] + alike * generator.standard_normal((1, 1, keys, P)))
    rates = np.exp(np.linspace(-6, 1, N))
    inputs["log_decay"] = -rates * generator.uniform(0, 2, (ROWS, length, N))
    inputs["beta"] = generator.uniform(0, 1, (ROWS, length, N))
    inputs["state"] = generator.standard_normal((ROWS, N, H, P))
    return {name: value.astype(np.float32) for name, value in inputs.items()}


@functools.cache
def chunked(chunk):
    def run(inputs, starts):
        return delta_rule(*(inputs[name] for name in NAMES), starts=starts, initial_state=inputs["state"], chunk=chunk)

    return jax.jit(run)


def slow(inputs, starts=None):
    wide = {name: value.astype(np.float64) for name, value in inputs.items()}
    return slow_delta_rule.recurrence(*(wide[name] for name in NAMES), starts, wide["state"])


def assert_close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    chunk=st.sampled_from([16, 64]),
    starts=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, LENGTH - 1)), max_size=8),
)
def test_chunks_are_the_recurrence(seed, chunk, starts):
    inputs = drawn(seed)
    begins = np.zeros((ROWS, LENGTH), bool)
    for row, token in starts:
        begins[row, token] = True
    y, state = chunked(chunk)(inputs, begins)
    want, last = slow(inputs, begins)
    assert_close(y, want)
    assert_close(state, last)


@pytest.mark.parametrize("length", [1, 15, 33])
def test_any_length_is_the_recurrence(length):
    inputs = drawn(length, length, keys=1)
    y, state = chunked(32)(inputs, None)
    want, last = slow(inputs)
    assert_close(y, want)
    assert_close(state, last)


def test_keys_that_are_nearly_alike_keep_their_digits():
    inputs = drawn(0, 256, alike=0.95)
    inputs["log_decay"] = inputs["log_decay"] * 1e-3  # products of whole corrections, none of them forgotten
    y, state = chunked(64)(inputs, None)
    want, last = slow(inputs)
    assert_close(y, want, 2e-5)
    assert_close(state, last, 2e-5)


def test_gradients_are_those_of_the_recurrence():
    inputs = {name: value if name == "state" else value[:, :37] for name, value in drawn(3).items()}
    starts = np.zeros((ROWS, 37), bool)
    starts[0, [16, 20]] = starts[1, 0] = True
    generator = np.random.default_rng(0)
    weights = generator.standard_normal((ROWS, 37, N, H)), generator.standard_normal((ROWS, N, H, P))

    def loss(inputs, run):
        return sum(jnp.sum(weight * each) for weight, each in zip(weights, run(inputs), strict=True))

    def token_by_token(inputs):
        def step(state, token):
            *token, start = token
            y, state = delta_rule_step(jnp.where(start[:, None, None, None], 0, state), *token)
            return state, y

        tokens = tuple(jnp.asarray(each).swapaxes(0, 1) for each in (*(inputs[name] for name in NAMES), starts))
        state, y = jax.lax.scan(step, inputs["state"], tokens)
        return y.swapaxes(0, 1), state

    got = jax.jit(jax.grad(lambda inputs: loss(inputs, lambda inputs: chunked(16)(inputs, starts))))(inputs)
    want = jax.jit(jax.grad(lambda inputs: loss(inputs, token_by_token)))(inputs)
    for name in inputs:
        assert np.abs(want[name]).max() > 0.1, name
        assert_close(got[name], want[name], 2e-5)


def test_one_step_is_the_recurrence():
    inputs = drawn(5, 1)
    y, state = delta_rule_step(inputs["state"], *(inputs[name][:, 0] for name in NAMES))
    want, last = slow(inputs)
    assert_close(y[:, None], want)
    assert_close(state, last)


def test_a_unit_has_the_length_one_in_float32():
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    got = unit(jnp.asarray(x, jnp.bfloat16))
    assert got.dtype == jnp.float32
    assert_close(got, slow_delta_rule.unit(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)), 1e-6)


def test_the_gradient_keeps_no_products_of_tokens():
    def temporaries(length):
        shapes = jax.eval_shape(lambda: {name: jnp.asarray(value) for name, value in drawn(0, length).items()})
        run = jax.grad(lambda inputs: jnp.sum(chunked(64)(inputs, None)[0] ** 2))
        return jax.jit(run).lower(shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(2048), temporaries(4096)
    assert long < 2.2 * short, "memory must be in proportion to the length"
    assert long < ROWS * N * 4096 * 64 * 4, "one product of every token with its chunk is more than may be kept"

"""The chunked scan is the recurrence: outputs, states and gradients, wherever documents begin and chunks end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.kernels.causal_convolution import causal_convolution
from dew.kernels.ssd import read_state, remaining, segment_sums, ssd, ssd_step, time_steps
from tests.kernels import slow_ssd

N, H, G, P = 4, 3, 2, 5
ROWS = 2
LENGTH = 70


def drawn(seed, length=LENGTH, groups=G, fastest=3.0):
    """Inputs in float64, some heads forgetting within a token or two and others hardly ever."""
    generator = np.random.default_rng(seed)
    shapes = {
        "x": (ROWS, length, N, H),
        "b": (ROWS, length, groups, P),
        "c": (ROWS, length, groups, P),
        "skip": (N,),
        "state": (ROWS, N, H, P),
    }
    inputs = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    inputs["dt"] = np.exp(generator.uniform(-5, 1, (ROWS, length, N))).astype(np.float32)
    inputs["decay"] = -np.exp(np.linspace(-2, fastest, N)).astype(np.float32)
    return inputs


@functools.cache
def chunked(chunk):
    def run(inputs, starts):
        return ssd(
            *(inputs[name] for name in ("x", "dt", "decay", "b", "c")),
            skip=inputs["skip"],
            starts=starts,
            initial_state=inputs["state"],
            chunk=chunk,
        )

    return jax.jit(run)


def slow(inputs, starts=None):
    wide = {name: value.astype(np.float64) for name, value in inputs.items()}
    return slow_ssd.recurrence(
        *(wide[name] for name in ("x", "dt", "decay", "b", "c")), wide["skip"], starts, wide["state"]
    )


def assert_close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    chunk=st.sampled_from([16, 32, 128]),
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


@pytest.mark.parametrize("length", [1, 15, 16, 33])
def test_any_length_is_the_recurrence(length):
    inputs = drawn(length, length, groups=1)
    y, state = chunked(32)(inputs, None)
    want, last = slow(inputs)
    assert_close(y, want)
    assert_close(state, last)


def test_gradients_are_those_of_the_recurrence():
    inputs = {name: value[:, :37] if value.ndim > 2 and name != "state" else value for name, value in drawn(3).items()}
    starts = np.zeros((ROWS, 37), bool)
    starts[0, [16, 20]] = starts[1, 0] = True
    generator = np.random.default_rng(0)
    weights = generator.standard_normal((ROWS, 37, N, H)), generator.standard_normal((ROWS, N, H, P))

    def loss(inputs, run):
        return sum(jnp.sum(weight * each) for weight, each in zip(weights, run(inputs), strict=True))

    def token_by_token(inputs):
        def step(state, token):
            x, dt, b, c, start = token
            state = jnp.where(start[:, None, None, None], 0, state)
            y, state = ssd_step(state, x, dt, inputs["decay"], b, c, skip=inputs["skip"])
            return state, y

        tokens = tuple(
            jnp.asarray(each).swapaxes(0, 1) for each in (*(inputs[k] for k in ("x", "dt", "b", "c")), starts)
        )
        state, y = jax.lax.scan(step, inputs["state"], tokens)
        return y.swapaxes(0, 1), state

    got = jax.jit(jax.grad(lambda inputs: loss(inputs, lambda inputs: chunked(16)(inputs, starts))))(inputs)
    want = jax.jit(jax.grad(lambda inputs: loss(inputs, token_by_token)))(inputs)
    for name in inputs:
        assert np.abs(want[name]).max() > 0.1, name
        assert_close(got[name], want[name], 2e-5)


def test_one_step_is_the_recurrence():
    inputs = drawn(5, 1)
    y, state = ssd_step(
        inputs["state"], *(inputs[name][:, 0] for name in ("x", "dt")), inputs["decay"],
        *(inputs[name][:, 0] for name in ("b", "c")), skip=inputs["skip"],
    )  # fmt: skip
    want, last = slow(inputs)
    assert_close(y[:, None], want)
    assert_close(state, last)


@pytest.mark.parametrize("starting", [False, True])
def test_a_state_that_is_known_later_adds_what_it_would_have(starting):
    inputs = drawn(7)
    starts = np.zeros((ROWS, LENGTH), bool)
    starts[1, 40] = starting
    want, last = slow(inputs, starts)
    y, state = chunked(32)(inputs | {"state": np.zeros_like(inputs["state"])}, starts)
    left = remaining(inputs["dt"], inputs["decay"], starts if starting else None)
    assert_close(y + read_state(inputs["c"], left, inputs["state"]), want)
    assert_close(state + left[:, -1, :, None, None] * inputs["state"], last)


def test_small_decays_after_large_ones_keep_their_digits():
    a = np.full(64, -1e-3, np.float32)
    a[:20] = -50.0
    got = np.asarray(segment_sums(jnp.asarray(a)))
    wide = np.cumsum(a.astype(np.float64))
    want = np.tril(wide[:, None] - wide[None, :])
    np.testing.assert_allclose(np.tril(got), want, rtol=1e-6, atol=1e-12)


def test_the_gradient_keeps_no_products_of_tokens():
    def temporaries(length):
        shapes = jax.eval_shape(lambda: {name: jnp.asarray(value) for name, value in drawn(0, length).items()})
        run = jax.grad(lambda inputs: jnp.sum(chunked(128)(inputs, None)[0] ** 2))
        return jax.jit(run).lower(shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(2048), temporaries(4096)
    assert long < 2.2 * short, "memory must be in proportion to the length"
    assert long < ROWS * N * 4096 * 128 * 4, "one product of every token with its chunk is more than may be kept"


def test_step_sizes_are_bounded():
    raw = np.array([[[-9.0, 0.0, 9.0]]], np.float32)
    got = time_steps(raw, np.array([0.0, 1.0, 0.0], np.float32), low=0.01, high=5.0)
    np.testing.assert_allclose(got[0, 0], [0.01, np.log1p(np.e), 5.0], rtol=1e-6)


@pytest.mark.parametrize("with_before", [False, True])
def test_the_convolution_is_the_slow_one(with_before):
    generator = np.random.default_rng(0)
    x, taps = generator.standard_normal((2, 9, 6)), generator.standard_normal((6, 4))
    before = generator.standard_normal((2, 3, 6)) if with_before else None
    starts = np.zeros((2, 9), bool)
    starts[0, [1, 2, 7]] = True
    narrow = [None if each is None else each.astype(np.float32) for each in (x, taps, before)]
    for begins in (None, starts):
        got = causal_convolution(*narrow, begins)
        assert_close(got, slow_ssd.convolution(x, taps, before, begins))

"""Scans on a device beside their recurrences, token by token in float64 on the host's CPU.

Parts: `state_space` and `delta`. Products of float32 are taken in float32 first, and then in as many bits as programs
give them here by default (fewer on GPUs and TPUs), with the tolerance of bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.kernels.delta_rule import delta_rule
from dew.kernels.ssd import ssd
from tools.device_check.parts import TOLERANCE, Sizes, compared, milliseconds, with_gradients

HEADS, GROUPS = 4, 2
SCAN_TOLERANCE = 1e-4
"""Of float32: sums of a scan are longer than those of a product, and a correction multiplies their rounding."""

Operands = tuple[np.ndarray, ...]


def _drawn(sizes: Sizes) -> tuple[np.random.Generator, Callable[..., np.ndarray], tuple[int, int], np.ndarray]:
    """Give a generator, normal numbers of a shape, rows and tokens, and where documents begin."""
    generator, shape = np.random.default_rng(0), (2, sizes.length)
    normal = lambda *shape: generator.standard_normal(shape).astype(np.float32)  # noqa: E731
    return generator, normal, shape, generator.random(shape) < 4 / sizes.length


def state_space(sizes: Sizes) -> Iterator[str]:
    """Compare Mamba-2's scan with its recurrence: outputs, last state and gradients."""
    generator, normal, shape, starts = _drawn(sizes)
    width = max(8, sizes.width // 32)
    dt = np.exp(generator.uniform(-5, 0, (*shape, HEADS))).astype(np.float32)
    decay = -np.exp(np.linspace(-2, 2, HEADS)).astype(np.float32)
    read_and_written = normal(*shape, GROUPS, 2 * width), normal(*shape, GROUPS, 2 * width)
    operands = (normal(*shape, HEADS, width), dt, decay, *read_and_written, normal(2, HEADS, width, 2 * width))

    def scan(x: Any, dt: Any, decay: Any, b: Any, c: Any, state: Any) -> Any:
        return ssd(x, dt, decay, b, c, starts=starts, initial_state=state)

    def written(state: Any, token: Any, decay: Any) -> Any:
        x, dt, b, _ = token
        return state * jnp.exp(dt * decay)[..., None, None] + (dt[..., None] * x)[..., None] * b[..., None, :]

    def recurrence(x: Any, dt: Any, decay: Any, b: Any, c: Any, state: Any) -> Any:
        return _token_by_token(functools.partial(written, decay=decay), (x, dt, *map(_of_heads, (b, c))), starts, state)

    yield from _beside(scan, recurrence, operands, sizes)


def delta(sizes: Sizes) -> Iterator[str]:
    """Compare the gated delta rule with its recurrence: outputs, last state and gradients."""
    generator, normal, shape, starts = _drawn(sizes)
    width = max(8, sizes.width // 32)
    keys = (normal(*shape, GROUPS, width) for _ in range(2))
    k, q = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in keys)
    log_decay = -np.exp(generator.uniform(-6, 0, (*shape, HEADS))).astype(np.float32)
    beta = generator.uniform(0, 1, (*shape, HEADS)).astype(np.float32)
    operands = (normal(*shape, HEADS, width), k, q, log_decay, beta, normal(2, HEADS, width, width))

    def scan(v: Any, k: Any, q: Any, log_decay: Any, beta: Any, state: Any) -> Any:
        return delta_rule(v, k, q, log_decay, beta, starts=starts, initial_state=state)

    def written(state: Any, token: Any) -> Any:
        v, k, log_decay, beta, _ = token
        state = state * jnp.exp(log_decay)[..., None, None]
        correction = beta[..., None] * (v - jnp.sum(state * k[..., None, :], axis=-1))
        return state + correction[..., None] * k[..., None, :]

    def recurrence(v: Any, k: Any, q: Any, log_decay: Any, beta: Any, state: Any) -> Any:
        return _token_by_token(written, (v, _of_heads(k), log_decay, beta, _of_heads(q)), starts, state)

    yield from _beside(scan, recurrence, operands, sizes)


def _of_heads(groups: Any) -> Any:
    """Give each head what its group has."""
    return jnp.repeat(groups, HEADS // GROUPS, axis=2)


def _token_by_token(written: Callable[..., Any], tokens: tuple[Any, ...], starts: Any, state: Any) -> Any:
    """Run a recurrence: outputs and last state. A token's last array is what reads the state."""

    def step(state: Any, given: Any) -> Any:
        token, begins = given
        state = written(jnp.where(begins[:, None, None, None], 0.0, state), token)
        return state, jnp.sum(state * token[-1][..., None, :], axis=-1)

    along = jax.tree.map(lambda each: jnp.swapaxes(each, 0, 1), (tokens, jnp.asarray(starts)))
    state, y = jax.lax.scan(step, state, along)
    return jnp.swapaxes(y, 0, 1), state


def _beside(
    scan: Callable[..., Any], recurrence: Callable[..., Any], operands: Operands, sizes: Sizes
) -> Iterator[str]:
    """Compare a scan with its recurrence, values and gradients, and time it."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        want = jax.device_get(with_gradients(recurrence)(*(each.astype(np.float64) for each in operands)))
    given = jax.device_put(operands)
    exact = jax.default_matmul_precision("highest")
    for words, precision, limit in (
        ("float32", exact, SCAN_TOLERANCE),
        ("default", contextlib.nullcontext(), TOLERANCE["bfloat16"]),
    ):
        with precision:
            run = with_gradients(scan)
            found = compared(run(*given), want, limit, f"products in {words} precision", results=2)
            took = milliseconds(functools.partial(run, *given), sizes.samples)
        yield f"{sizes.length} tokens, products in {words} precision: {found}, {took:.2f} ms"

"""Attention on a device: the kernel that the table chooses is in the program, right, and how fast it is.

Parts: `kernels`, `blocks`, `kernel_speed`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dew.kernels import attention_xla
from dew.kernels.attention import attention, consecutive_visibility
from dew.kernels.attention_choice import AttentionCall, attention_choice
from tools.device_check.parts import TOLERANCE, NotRun, Sizes, compared, milliseconds, with_gradients

KERNEL_NAMES = {"cudnn": "__cudnn$fmha", "tpu": "tpu_custom_call"}
"""What a compiled program calls where the kernel runs."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of attention, for values and for the choice."""

    name: str
    dtype: str = "bfloat16"
    head_dim: int = 64
    value_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    packed: bool = False
    softcap: float | None = None
    sinks: bool = False


CASES = (
    Case("causal"),
    Case("causal, wide heads", head_dim=128),
    Case("causal, heads of 256", head_dim=256),
    Case("causal, float16", dtype="float16"),
    Case("causal, float32", dtype="float32"),
    Case("window", window=100),
    Case("documents", packed=True),
    Case("documents and window", packed=True, window=100),
    Case("chunks", chunk=100),
    Case("softcap", softcap=20.0),
    Case("sinks", sinks=True),
    Case("narrower values", head_dim=128, value_dim=64),
)
TIMED = ("causal", "window", "documents")


def _call(case: Case, length: int) -> tuple[tuple[Any, ...], AttentionCall, Callable[..., Any]]:
    """Draw query, key and value; give them with the description of the call and the call by implementation."""
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (2, length, 8, case.head_dim), case.dtype)
    widths = case.head_dim, case.value_dim or case.head_dim
    key, value = (
        jax.random.normal(k, (2, 4, length, width), case.dtype) for k, width in zip(keys[1:3], widths, strict=True)
    )
    segments = jnp.sort(jax.random.randint(keys[3], (2, length), 1, 6), axis=1) if case.packed else None
    visibility = consecutive_visibility(
        length, length, query_segments=segments, key_segments=segments, window=case.window, chunk=case.chunk
    )
    sinks = jnp.linspace(-1.0, 2.0, 8) if case.sinks else None
    call = AttentionCall.of(query, key, visibility, case.softcap, sinks, value_dim=widths[1])
    scale = case.head_dim**-0.5
    mixed = functools.partial(attention, visibility=visibility, scale=scale, softcap=case.softcap, sinks=sinks)
    by = lambda implementation: with_gradients(functools.partial(mixed, implementation=implementation))  # noqa: E731
    return (query, key, value), call, by


def kernels(sizes: Sizes) -> Iterator[str]:
    """Compare the chosen kernel's values and gradients with the XLA path in float32, and look for it in the program."""
    for case in CASES:
        heads, call, by = _call(case, sizes.length)
        choice = attention_choice(call)
        # Without it a GPU multiplies float32 in fewer bits.
        with jax.default_matmul_precision("highest"):
            program = by("auto").lower(*heads).compile()
            want = by("xla")(*(each.astype(jnp.float32) for each in heads))
        called = [kernel for kernel, name in KERNEL_NAMES.items() if name in program.as_text()]
        if called != ([] if choice.kernel == "xla" else [choice.kernel]):
            raise AssertionError(f"{case.name}: the table chose {choice}, the program calls {called or 'no kernel'}")
        found = compared(program(*heads), want, TOLERANCE[case.dtype], f"{case.name} by {choice.kernel}")
        yield f"{case.name}, {case.dtype}: {choice}; {found}"


def blocks(sizes: Sizes) -> Iterator[str]:
    """Compare XLA's attention in blocks with the one that keeps all logits, both in float32."""
    for case in (dataclasses.replace(case, dtype="float32") for case in CASES if case.head_dim == 64):
        heads, _, by = _call(case, sizes.length)
        found = []
        for queries in (0, sizes.length):
            usual, attention_xla.DENSE_QUERIES = attention_xla.DENSE_QUERIES, queries
            try:
                with jax.default_matmul_precision("highest"):
                    found.append(by("xla")(*heads))
            finally:
                attention_xla.DENSE_QUERIES = usual
        yield f"{case.name}: {compared(*found, TOLERANCE['float32'], case.name)}"


def kernel_speed(sizes: Sizes) -> Iterator[str]:
    """Time the chosen kernel beside XLA's."""
    if attention_choice(_call(CASES[0], sizes.length)[1]).kernel == "xla":
        raise NotRun("the table chooses XLA here: there is nothing to compare")
    for case in (case for case in CASES if case.name in TIMED):
        heads, _, by = _call(case, 2 * sizes.length)
        times = []
        for implementation in ("auto", "xla"):
            run = by(implementation)
            jax.block_until_ready(run(*heads))
            times.append(f"{implementation} {milliseconds(functools.partial(run, *heads), 10):.2f} ms")
        yield f"{case.name}, {2 * sizes.length} tokens, forward and backward: {', '.join(times)}"

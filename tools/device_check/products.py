"""Products on a device: those of sorted rows with the matrix of their group, and those in 8 bits.

Parts: `grouped` and `quantized_products`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dew.kernels.attention_choice import accelerator
from dew.kernels.grouped_matmul import grouped_matmul
from dew.kernels.quantized_product import Quantization, product, quantized
from dew.planning.hlo import array_shapes, computations
from tools.device_check.parts import TOLERANCE, NotRun, Sizes, compared, differences, milliseconds, with_gradients

ELEMENT = {"int8": "s8", "fp8": "f8e4m3fn"}
"""Element type of the factors in a compiled program."""
ROUNDING = {"int8": (2e-3, 3e-2), "fp8": (5e-3, 1e-1)}
"""Least and largest difference of a product that 8 bits make, over the largest value: 1/254 of a row's largest number
for each factor, or 1/16 of each number, at random over sums of hundreds."""
FP8_CAPABILITY = (8, 9)
"""CUDA devices of this compute capability (Ada) or newer multiply E4M3 numbers."""


def grouped(sizes: Sizes) -> Iterator[str]:
    """Compare the products of sorted rows with a product per group, values and gradients, and time both forms."""
    keys, groups = jax.random.split(jax.random.key(0), 2), 8
    counts = jnp.asarray([sizes.length // 4, 0, 1, sizes.length // 2, 7, sizes.length // 8, 3, 5], jnp.int32)
    rows = jax.random.normal(keys[0], (sizes.length, 4 * sizes.width), "bfloat16")
    banks = jax.random.normal(keys[1], (groups, 4 * sizes.width, 2 * sizes.width), "bfloat16") / sizes.width**0.5
    group = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(sizes.length), side="right")
    mask = jax.nn.one_hot(group, groups, dtype=jnp.float32)

    def by_group(rows: Any, banks: Any) -> Any:
        return sum((rows @ banks[number]) * mask[:, number : number + 1] for number in range(groups))

    with jax.default_matmul_precision("highest"):
        want = with_gradients(by_group)(rows.astype("float32"), banks.astype("float32"))
    for implementation in ("blocks", "ragged"):
        run = with_gradients(functools.partial(grouped_matmul, sizes=counts, implementation=implementation))
        found = compared(run(rows, banks), want, TOLERANCE["bfloat16"], implementation)
        yield f"{implementation}: {found}, {milliseconds(lambda run=run: run(rows, banks), sizes.samples):.2f} ms"


def quantized_products(sizes: Sizes, kind: Quantization) -> Iterator[str]:
    """Compare a product in 8 bits with the exact one, look for its factors in the program, and time both.

    Args:
        sizes: How large it is.
        kind: How its factors are rounded.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (sizes.length, 8 * sizes.width), "bfloat16")
    kernel = jax.random.normal(keys[1], (8 * sizes.width, 4 * sizes.width), "float32") / (8 * sizes.width) ** 0.5
    exact = jax.jit(lambda x, kernel: product(x, kernel, 1))
    with jax.default_matmul_precision("highest"):
        want = exact(x.astype("float32"), kernel)
    with quantized(kind):
        program = jax.jit(lambda x, kernel: product(x, kernel, 1)).lower(x, kernel).compile()
        gradients = with_gradients(lambda x, kernel: product(x, kernel, 1))(x, kernel)
    least, most = ROUNDING[kind]
    (error,) = differences([program(x, kernel)], [want], most, kind)
    if error < least:
        raise AssertionError(f"{kind} differs by {error:.1e} of the largest value: nothing was rounded")
    times = (f"{milliseconds(lambda run=run: run(x, kernel), sizes.samples):.2f} ms" for run in (program, exact))
    yield f"{kind} differs by {error:.1e} of the largest value; {', in bfloat16 '.join(times)}"
    # The cotangent is the cosine of what was rounded: compared with the exact product's at that cotangent.
    cotangent = jnp.cos(gradients[0].astype("float32")).astype(x.dtype)
    wanted = jax.jit(lambda x, kernel, cotangent: jax.vjp(exact, x, kernel)[1](cotangent))(x, kernel, cotangent)
    off = max(differences(gradients[1:], wanted, TOLERANCE["bfloat16"], f"gradients under {kind}"))
    yield f"gradients differ from the exact product's by {off:.1e}"
    if multiplies(program.as_text(), ELEMENT[kind]):
        return
    here = accelerator()
    if here.platform == "cpu" or (kind == "fp8" and here.platform == "cuda" and here.capability < FP8_CAPABILITY):
        raise NotRun(f"a {jax.devices()[0].device_kind} multiplies {kind} numbers as wider ones")
    raise AssertionError(f"the program has no product of two factors of type {ELEMENT[kind]}")


def multiplies(text: str, element: str) -> bool:
    """Say whether a compiled program has a product, or a call of a library, of two factors of an element type.

    Args:
        text: The program.
        element: The type, as the program writes it.
    """
    for instructions in computations(text)[0].values():
        types = {each.name: [dtype for dtype, _ in array_shapes(each.result)] for each in instructions}
        for each in instructions:
            if each.opcode in ("dot", "convolution", "custom-call"):
                factors = [types.get(name) for name in each.operands]
                if factors.count([element]) >= 2:
                    return True
    return False

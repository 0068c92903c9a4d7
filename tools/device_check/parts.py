"""What a part of the check is, how large it is, and how parts run one after another: `check`.

A part is a generator of lines; it raises `NotRun` where it cannot run, and anything else where it fails. What several
parts do alike is here too: values with their gradients, differences, times.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BUDGET_SECONDS = 540.0
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest difference from float32 over the largest value."""


class NotRun(Exception):  # noqa: N818 - it is no error
    """A part cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the parts are.

    Attributes:
        length: Tokens of a row in the kernels' part.
        layers: Layers of the models that are timed.
        vocab: Their vocabulary.
        rows: Rows of the calls that are timed, one number after the other; a step has the last one.
        gigabytes: Size of the checkpoint that is loaded.
        samples: Timed samples.
        width: Width of the model whose use of the device is measured.
    """

    length: int
    layers: int
    vocab: int
    rows: tuple[int, ...]
    gigabytes: float
    samples: int
    width: int


FULL = Sizes(length=2048, layers=30, vocab=49152, rows=(1, 8), gigabytes=2.0, samples=5, width=2048)
TINY = Sizes(length=640, layers=2, vocab=256, rows=(1,), gigabytes=0.02, samples=1, width=32)

Part = Callable[[Sizes], Iterator[str]]


def check(parts: dict[str, Part], sizes: Sizes, budget: float) -> dict[str, str]:
    """Run parts one after another and print what they find.

    Args:
        parts: Name to part.
        sizes: How large they are.
        budget: Seconds after which no further part begins.

    Returns:
        Name to "ok", "FAILED: reason" or "not run: reason".
    """
    began, results = time.perf_counter(), {}
    for name, part in parts.items():
        start = time.perf_counter()
        if start - began >= budget:
            results[name] = f"not run: {budget:.0f} s were used"
        else:
            print(f"== {name}", flush=True)
            results[name] = _ended(part(sizes))
        print(f"== {name}: {results[name]} ({time.perf_counter() - start:.1f} s)\n", flush=True)
    print("\n".join(f"{name:16}  {result}" for name, result in results.items()))
    return results


def _ended(lines: Iterator[str]) -> str:
    """Run one part to its end, whatever that is."""
    try:
        for line in lines:
            print(f"   {line}", flush=True)
    except NotRun as reason:
        return f"not run: {reason}"
    except Exception as error:
        traceback.print_exc()
        return f"FAILED: {type(error).__name__}: {error}"
    return "ok"


def benchmark(name: str) -> Any:
    """Import a script that stands beside this package and imports its own neighbours."""
    folder = str(pathlib.Path(__file__).resolve().parents[1])
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def with_gradients(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Compile a function together with the gradients of the sum of its results' sines.

    Args:
        function: Arrays to an array or a tuple of them.

    Returns:
        The same arrays to the function's results and then the gradient of each array.
    """

    def loss(operands: tuple[Any, ...]) -> tuple[Any, Any]:
        results = jax.tree.leaves(function(*operands))
        return sum(jnp.sum(jnp.sin(each.astype(jnp.promote_types(each.dtype, "float32")))) for each in results), results

    def run(*operands: Any) -> tuple[Any, ...]:
        gradients, results = jax.grad(loss, has_aux=True)(operands)
        return *results, *gradients

    return jax.jit(run)


def differences(got: Sequence[Any], want: Sequence[Any], limit: float, what: str) -> list[float]:
    """Give the largest difference of each array over the largest value wanted.

    Args:
        got: Arrays.
        want: What they should be.
        limit: The most that is allowed.
        what: What they are, for the error.

    Raises:
        AssertionError: If one differs by more.
    """
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(got, want, strict=True)]
    found = [float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in wide]
    if not max(found) < limit:  # a NaN is over the limit too
        raise AssertionError(f"{what}: {', '.join(f'{each:.1e}' for each in found)} of the largest value, over {limit}")
    return found


def compared(got: Sequence[Any], want: Sequence[Any], limit: float, what: str, results: int = 1) -> str:
    """Say in words how far the results and the gradients of `with_gradients` are from what is wanted.

    Args:
        got: Results and gradients.
        want: What they should be.
        limit: The most that is allowed.
        what: What they are, for the error.
        results: How many are results.

    Raises:
        AssertionError: If one differs by more.
    """
    found = differences(got, want, limit, what)
    return f"values {max(found[:results]):.1e}, gradients {max(found[results:]):.1e}"


def milliseconds(run: Callable[[], Any], samples: int) -> float:
    """Time a compiled call that has run before: the mean of so many, sent one after another."""
    began = time.perf_counter()
    jax.block_until_ready([run() for _ in range(samples)])
    return 1e3 * (time.perf_counter() - began) / samples

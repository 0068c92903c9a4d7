"""Products of activations and weights in 8 bits, with the gradients of the unquantised ones.

Entry points: `product`, `quantized`, `checked_quantization`. Each row of activations and each output of a kernel is
scaled by its largest magnitude (https://arxiv.org/abs/1712.05877, section 2); gradients pass the rounding straight
through (https://arxiv.org/abs/1308.3432, section 4). qwix rounds and multiplies.
"""

import contextlib
import contextvars
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float

Quantization = Literal["int8", "fp8"]
_TYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
_CURRENT: contextvars.ContextVar[Quantization | None] = contextvars.ContextVar("quantization", default=None)


def checked_quantization(quantization: Any) -> Quantization | None:
    """Check how products are to be computed.

    Args:
        quantization: "int8", "fp8" (E4M3), or None for the dtype of the activations.

    Raises:
        ValueError: If it is none of these.
        ImportError: If qwix is not installed.
    """
    if quantization is None:
        return None
    if quantization not in get_args(Quantization):
        raise ValueError(f"quantization must be 'int8', 'fp8' or None. Received: quantization={quantization!r}")
    if importlib.util.find_spec("qwix") is None:
        raise ImportError(
            f"quantization={quantization!r} computes with qwix, which is not installed. Run "
            "pip install 'dew[quantization]', or leave quantization=None."
        )
    return quantization


@contextlib.contextmanager
def quantized(quantization: Quantization | None) -> Iterator[None]:
    """Compute the products that are traced inside in 8 bits.

    Args:
        quantization: As `checked_quantization` gives it.
    """
    token = _CURRENT.set(quantization)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def product(x: Float[Array, "..."], kernel: Float[Array, "..."], contracted: int) -> Float[Array, "..."]:
    """Multiply the trailing dimensions of `x` with the leading ones of a kernel, as `quantized` says.

    Args:
        x: Activations.
        kernel: Weights.
        contracted: How many dimensions are summed over.

    Returns:
        The product, in the dtype of `x`.
    """
    # A product over the kernel as it is stored: a reshaped copy of it would be kept for the backward pass.
    quantization = _CURRENT.get()
    if quantization is None:
        return jnp.tensordot(x, kernel.astype(x.dtype), axes=contracted)
    return _quantized_product(x, kernel, contracted, quantization)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _quantized_product(x: Array, kernel: Array, contracted: int, quantization: Quantization) -> Array:
    import qwix

    rows, summed = x.ndim - contracted, tuple(range(contracted))
    kind = _TYPES[quantization]
    factors = (
        qwix.quantize(x, kind, channelwise_axes=range(rows)),
        qwix.quantize(kernel.astype(x.dtype), kind, channelwise_axes=range(contracted, kernel.ndim)),
    )
    numbers = ((tuple(range(rows, x.ndim)), summed), ((), ()))
    return qwix.dot_general(*factors, numbers).astype(x.dtype)


def _forward(x: Array, kernel: Array, contracted: int, quantization: Quantization) -> Any:
    return _quantized_product(x, kernel, contracted, quantization), (x, kernel)


def _backward(contracted: int, quantization: Quantization, residuals: Any, cotangent: Array) -> Any:
    exact = lambda x, kernel: jnp.tensordot(x, kernel.astype(x.dtype), axes=contracted)  # noqa: E731
    return jax.vjp(exact, *residuals)[1](cotangent)


_quantized_product.defvjp(_forward, _backward)

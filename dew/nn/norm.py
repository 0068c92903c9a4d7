"""Normalisation of the residual stream, of queries and of keys, with the order of casts as data.

Entry points: `NormSpec`, `Norm` (root mean square: https://arxiv.org/abs/1910.07467, layer norm:
https://arxiv.org/abs/1607.06450).
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from dew.arrays import Array, Float
from dew.nn.sharding import declare


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSpec:
    """How a family normalises.

    Attributes:
        eps: Added to the mean square, or to the variance.
        kind: "rms" divides by the root mean square, "layer" subtracts the mean first.
        bias: Whether a bias is added after the scale.
        offset: Added to the stored scale, in float32 (1.0 where a checkpoint stores scale - 1).
        cast: Where the normalised value goes back to the input's dtype: before the scale multiplies it (Llama,
            Qwen) or after it and the bias (Gemma, OLMo, every layer norm). The two differ in bfloat16.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    offset: float = 0.0
    cast: Literal["before_scale", "after_scale"] = "before_scale"

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(f"a norm needs a positive eps. Received: eps={self.eps}")
        if self.kind not in ("rms", "layer"):
            raise ValueError(f"kind must be 'rms' or 'layer'. Received: kind={self.kind!r}")
        if self.cast not in ("before_scale", "after_scale"):
            raise ValueError(f"cast must be 'before_scale' or 'after_scale'. Received: cast={self.cast!r}")


class Norm(nn.Module):
    """Normalise the last dimension, or several last dimensions together, and scale it.

    Attributes:
        features: Size of the last dimension; with `dims` > 1 the product of the last sizes.
        spec: Kind, epsilon and order of casts.
        param_dtype: Storage dtype of the scale and the bias.
        dims: How many of the last dimensions are normalised together.
    """

    features: int
    spec: NormSpec
    param_dtype: Any = "float32"
    dims: int = 1

    def setup(self) -> None:
        """Declare the scale, which starts so that the norm multiplies by one, and the bias."""
        initializer = nn.initializers.constant(1.0 - self.spec.offset)
        self.scale = declare(self, "scale", (self.features,), ("norm",), initializer, self.param_dtype)
        self.bias = (
            declare(self, "bias", (self.features,), ("norm",), nn.initializers.zeros, self.param_dtype)
            if self.spec.bias
            else None
        )

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise `x` in float32 and return its dtype."""
        shape = x.shape[x.ndim - self.dims :]
        bias = None if self.bias is None else self.bias.reshape(shape)
        return _normalise(x, self.scale.reshape(shape), bias, self.spec)


@functools.partial(jax.checkpoint, static_argnums=3, prevent_cse=False)
def _normalise(x: Array, scale: Array, bias: Array | None, spec: NormSpec) -> Array:
    """Normalise and scale; the backward pass keeps `x` and computes the normalised value again."""
    wide, dims = x.astype(jnp.float32), tuple(range(-scale.ndim, 0))
    if spec.kind == "layer":
        wide = wide - jnp.mean(wide, axis=dims, keepdims=True)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=dims, keepdims=True) + spec.eps)
    scale = scale.astype(jnp.float32) + spec.offset if spec.offset else scale
    dtype = x.dtype if spec.cast == "before_scale" else jnp.float32
    scaled = scale.astype(dtype) * normal.astype(dtype)
    return (scaled if bias is None else scaled + bias.astype(dtype)).astype(x.dtype)

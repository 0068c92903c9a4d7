"""Root-mean-square normalisation, with the order of casts as data.

Entry points: `NormSpec`, `RmsNorm` (https://arxiv.org/abs/1910.07467).
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
        eps: Added to the mean square.
        offset: Added to the stored scale (1.0 where a checkpoint stores scale - 1).
        cast: Where the normalised value goes back to the input's dtype: before the scale multiplies it (Llama,
            Qwen) or after. The two differ in bfloat16.
    """

    eps: float
    offset: float = 0.0
    cast: Literal["before_scale", "after_scale"] = "before_scale"

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(f"a norm needs a positive eps. Received: eps={self.eps}")
        if self.cast not in ("before_scale", "after_scale"):
            raise ValueError(f"cast must be 'before_scale' or 'after_scale'. Received: cast={self.cast!r}")


class RmsNorm(nn.Module):
    """Divide the last dimension by its root mean square and scale it.

    Attributes:
        features: Size of the last dimension.
        spec: Epsilon and order of casts.
        param_dtype: Storage dtype of the scale.
    """

    features: int
    spec: NormSpec
    param_dtype: Any = "float32"

    def setup(self) -> None:
        """Declare the scale; it starts so that the norm multiplies by one."""
        initializer = nn.initializers.constant(1.0 - self.spec.offset)
        self.scale = declare(self, "scale", (self.features,), ("norm",), initializer, self.param_dtype)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise `x` in float32 and return its dtype."""
        return _normalise(x, self.scale, self.spec)


@functools.partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def _normalise(x: Array, scale: Array, spec: NormSpec) -> Array:
    """Normalise and scale; the backward pass keeps `x` and computes the normalised value again."""
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + spec.eps)
    scale = scale + spec.offset if spec.offset else scale
    if spec.cast == "before_scale":
        return scale.astype(x.dtype) * normal.astype(x.dtype)
    return (scale.astype(jnp.float32) * normal).astype(x.dtype)

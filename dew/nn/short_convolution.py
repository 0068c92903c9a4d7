"""What the short convolutions of mixers with a state share: their weights, and the tokens that a cache keeps for them.

Entry points: `Taps`, `joined`; `dew.kernels.causal_convolution` computes them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dew.arrays import Array
from dew.nn.sharding import declare


class Taps(nn.Module):
    """Weights of a convolution that mixes no channels.

    Attributes:
        channels: Sizes of the dimensions of channels.
        names: Their logical names.
        count: Taps.
        use_bias: Whether there is a bias.
        param_dtype: Storage dtype.
    """

    channels: tuple[int, ...]
    names: tuple[str, ...]
    count: int
    use_bias: bool
    param_dtype: Any = "float32"

    def setup(self) -> None:
        """Declare taps and bias."""
        bound = self.count**-0.5
        shape, dtype = (*self.channels, self.count), self.param_dtype
        self.taps = declare(self, "kernel", shape, (*self.names, None), _uniform(bound), dtype)
        zeros = nn.initializers.zeros
        self.bias = declare(self, "bias", self.channels, self.names, zeros, dtype) if self.use_bias else None


def joined(before: Array, new: Array, real: Array | None) -> Array:
    """Put the tokens that a cache kept right before the first real one.

    Args:
        before: What was kept of the W - 1 tokens before, [B, W - 1, ...].
        new: New tokens, [B, T, ...].
        real: Which of them are no padding, which is on the left; None means all.

    Returns:
        [B, W - 1 + T, ...], whose last W - 1 tokens are kept next.
    """
    if real is None:
        return jnp.concatenate([before, new], axis=1)
    wide = real.reshape(*real.shape, *(1,) * (new.ndim - 2))
    padded = jnp.concatenate([jnp.zeros_like(before), jnp.where(wide, new, 0)], axis=1)
    first = jnp.where(real.any(axis=1), jnp.argmax(real, axis=1), real.shape[1])
    return jax.vmap(lambda row, kept, at: jax.lax.dynamic_update_slice_in_dim(row, kept, at, 0))(padded, before, first)


def _uniform(bound: float) -> Any:
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)

"""A short causal convolution of each channel on its own, within documents.

Entry point: `causal_convolution`. A handful of taps: shifted products, which XLA fuses into one pass.
"""

import jax.numpy as jnp

from dew.arrays import Array, Bool, Float


def causal_convolution(
    x: Float[Array, "B T ..."],
    taps: Float[Array, "... W"],
    before: Float[Array, "B _ ..."] | None = None,
    starts: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T ..."]:
    """Mix each token with the W - 1 tokens before it, channel by channel.

    Args:
        x: Values, with any dimensions of channels.
        taps: Weight of each channel and distance, the token's own last.
        before: The W - 1 tokens before the first; None means zeros.
        starts: Tokens that read nothing before them, nor does a later token through them; None means none.

    Returns:
        The mixed values, in the dtype of `x`.
    """
    T, reach = x.shape[1], taps.shape[-1] - 1
    if before is None:
        before = jnp.zeros((x.shape[0], reach, *x.shape[2:]), x.dtype)
    seen = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    taps = taps.astype(x.dtype)
    if starts is not None:
        documents = jnp.cumsum(jnp.pad(starts, ((0, 0), (reach, 0))), axis=1)
    y = x * taps[..., reach]
    for distance in range(1, reach + 1):
        shifted = seen[:, reach - distance : reach - distance + T]
        if starts is not None:
            own = documents[:, reach - distance : reach - distance + T] == documents[:, reach:]
            shifted = jnp.where(own.reshape(*own.shape, *(1,) * (x.ndim - 2)), shifted, 0)
        y = y + shifted * taps[..., reach - distance]
    return y

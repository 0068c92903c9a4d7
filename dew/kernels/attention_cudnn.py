"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`.

Entry point: `cudnn_attention`. What it needs of a call is in `dew.kernels.attention_choice`.
"""

import jax

from dew.arrays import Array, Float
from dew.kernels.visibility import Visibility


def cudnn_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S H"],
    visibility: Visibility,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Mix values as `dew.kernels.attention.attention` does.

    Causal order and a window are flags, and the kernel skips the blocks they hide. Documents and chunks are an
    explicit mask, which it reads.

    Args:
        query: Queries, bfloat16 or float16.
        key: Keys.
        value: Values.
        visibility: Queries and keys that begin at the same slot.
        scale: Factor on the logits.

    Returns:
        The mixed values, in the dtype of `query`.
    """
    masked = needs_mask(visibility)
    window = None if visibility.window is None or masked else (visibility.window - 1, 0)
    return jax.nn.dot_product_attention(
        query,
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        mask=visibility.mask()[:, None] if masked else None,
        scale=scale,
        is_causal=True,
        local_window_size=window,
        implementation="cudnn",
    )


def needs_mask(visibility: Visibility) -> bool:
    """Say whether flags cannot describe which keys are visible."""
    return visibility.query_segments is not None or visibility.chunk is not None

"""Products of narrow arrays with float32 sums, on every platform.

Entry point: `wide_einsum`.
"""

import jax
import jax.numpy as jnp

from dew.arrays import Array


def wide_einsum(subscripts: str, left: Array, right: Array) -> Array:
    """Compute an einsum of two arrays whose sums and result are float32.

    XLA's CPU backend compiles some of these products of bfloat16 to a call that fails when it runs ("Unsupported
    element type for DotThunk"); there the operands are widened first.

    Args:
        subscripts: Subscripts of `jnp.einsum`.
        left: First operand.
        right: Second operand.

    Returns:
        The result in float32.
    """
    if left.dtype == right.dtype == jnp.float32:
        return jnp.einsum(subscripts, left, right)

    def widened(left: Array, right: Array) -> Array:
        return jnp.einsum(subscripts, left.astype(jnp.float32), right.astype(jnp.float32))

    def narrow(left: Array, right: Array) -> Array:
        return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)

    return jax.lax.platform_dependent(left, right, cpu=widened, default=narrow)

"""Rows sorted by group, each multiplied by the matrix of its group.

Entry point: `grouped_matmul`. On TPU it is `jax.lax.ragged_dot`. On CPU XLA expands that to one product per group over
all rows (4.6 times the arithmetic at 4 groups), so elsewhere a loop takes blocks of rows that share a group, as
MegaBlocks does (https://arxiv.org/abs/2211.15841, section 5): work grows with the rows, not with the groups.
"""

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float, Int

IMPLEMENTATIONS: tuple[str, ...] = ("auto", "ragged", "blocks")
MAX_BLOCK_ROWS = 128
MIN_BLOCK_ROWS = 8


def grouped_matmul(
    rows: Float[Array, "R D"],
    banks: Float[Array, "E D F"],
    sizes: Int[Array, "E"],
    *,
    implementation: str = "auto",
) -> Float[Array, "R F"]:
    """Multiply each row by the matrix of its group.

    Products are summed in float32 and rounded once. Differentiable (in reverse) by `rows` and `banks`.

    Args:
        rows: Rows, those of group 0 first, then those of group 1, and so on.
        banks: One matrix per group.
        sizes: Rows of each group; together at most all. Rows behind the last group come out as zeros.
        implementation: "ragged" is XLA's own operation, "blocks" the loop; "auto" is "ragged" on TPU, else "blocks".

    Raises:
        ValueError: If the implementation is unknown.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}. Received: implementation={implementation!r}"
        )
    if implementation == "auto":
        implementation = "ragged" if jax.default_backend() == "tpu" else "blocks"
    if implementation == "ragged":
        product = jax.lax.ragged_dot(rows, banks, sizes.astype(jnp.int32), preferred_element_type=jnp.float32)
        return product.astype(rows.dtype)
    return _in_blocks(rows, banks, sizes.astype(jnp.int32))


def block_rows(num_rows: int, num_groups: int) -> int:
    """Choose how many rows a block has: about those of an average group, in powers of two.

    Args:
        num_rows: Rows.
        num_groups: Groups.
    """
    average = max(1, num_rows // max(1, num_groups))
    return min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, 1 << (average - 1).bit_length()))


@jax.custom_vjp
def _in_blocks(rows: Array, banks: Array, sizes: Array) -> Array:
    return _products(rows, banks, sizes, contracted=0)


def _forward(rows, banks, sizes):
    return _products(rows, banks, sizes, contracted=0), (rows, banks, sizes)


def _backward(residuals, cotangent):
    rows, banks, sizes = residuals
    cotangent = cotangent.astype(rows.dtype)
    by_rows = _products(cotangent, banks, sizes, contracted=1)
    return by_rows, _outer_products(rows, cotangent, sizes).astype(banks.dtype), None


_in_blocks.defvjp(_forward, _backward)


def _products(rows: Array, banks: Array, sizes: Array, *, contracted: int) -> Array:
    """Multiply block by block, contracting dimension `contracted` of each group's matrix.

    Blocks come in the order of their rows, and a block writes whole: what it writes past the end of its group is
    overwritten by the blocks of the next.
    """
    count, size = rows.shape[0], block_rows(rows.shape[0], banks.shape[0])
    padded = jnp.pad(rows, ((0, size), (0, 0)))
    out = jnp.zeros((count + size, banks.shape[2 - contracted]), rows.dtype)
    locate, num_blocks = _blocks(sizes, size)

    def step(number, out):
        group, start, _ = locate(number)
        block = jax.lax.dynamic_slice_in_dim(padded, start, size)
        matrix = jax.lax.dynamic_index_in_dim(banks, group, keepdims=False).astype(rows.dtype)
        product = jax.lax.dot_general(
            block, matrix, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), start, 0)

    out = jax.lax.fori_loop(0, num_blocks, step, out)[:count]
    return jnp.where((jnp.arange(count) < jnp.sum(sizes))[:, None], out, 0)


def _outer_products(rows: Array, cotangent: Array, sizes: Array) -> Array:
    """Sum rows^T cotangent over each group, in float32."""
    size = block_rows(rows.shape[0], sizes.shape[0])
    rows, cotangent = (jnp.pad(each, ((0, size), (0, 0))) for each in (rows, cotangent))
    locate, num_blocks = _blocks(sizes, size)

    def step(number, sums):
        group, start, stop = locate(number)
        inside = (start + jnp.arange(size) < stop)[:, None]
        left = jnp.where(inside, jax.lax.dynamic_slice_in_dim(rows, start, size), 0)
        right = jax.lax.dynamic_slice_in_dim(cotangent, start, size)
        product = jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return sums.at[group].add(product)

    empty = jnp.zeros((sizes.shape[0], rows.shape[1], cotangent.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, num_blocks, step, empty)


def _blocks(sizes: Array, size: int):
    """Cut groups into blocks: a function from a block's number to its group, first row and group's end; their count."""
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    last = jnp.cumsum(-(-sizes // size))
    first = last - (-(-sizes // size))

    def locate(number):
        group = jnp.searchsorted(last, number, side="right")
        return group, starts[group] + (number - first[group]) * size, ends[group]

    return locate, last[-1]

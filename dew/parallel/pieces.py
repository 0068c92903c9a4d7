"""Attention whose keys arrive in pieces: the running result, and the gradients of one piece from the final one.

Entry points: `Blocks`, `add_piece`, `piece_gradients`. The backward pass computes a piece's logits again and weighs
them by the final log-sum-exp, so no piece is kept (FlashAttention, https://arxiv.org/abs/2205.14135, section 3.1; over
devices, https://arxiv.org/abs/2310.01889): 7 products of 2 H operations a pair of query and key, and query head.
"""

import jax.numpy as jnp
from flax import struct

from dew.arrays import Array, Float, Int
from dew.kernels.attention import merge, with_sinks
from dew.kernels.attention_xla import MASKED
from dew.kernels.dropout import AttentionDropout
from dew.parallel.attention_shard import AttentionShard, SplitAttention, segments_from

Result = tuple[Float[Array, "P B C N H"], Float[Array, "P B C N"]]
"""Mixed values and log-sum-exp, float32, of every block of queries."""
KeyBlock = tuple[Float[Array, "B C K H"], Float[Array, "B C K H"], Array]
"""Keys, values, and the position of the first."""


@struct.dataclass
class Blocks:
    """The queries of one device as equal blocks of consecutive positions.

    Attributes:
        queries: The blocks.
        starts: Position of the first query of each.
        segments: Document numbers of whole rows; None when all are one document.
        dropout: What drops probabilities of these rows and heads; None drops none.
    """

    queries: Float[Array, "P B C N H"]
    starts: Int[Array, "P"]
    segments: Int[Array, "#B T"] | None
    dropout: AttentionDropout | None

    def of(self, number: Array | int) -> tuple[Array, Array]:
        """Give one block and its start."""
        return self.queries[number], self.starts[number]


def no_pieces(queries: Float[Array, "P B C N H"]) -> Result:
    """Give the result of queries that have read nothing."""
    return jnp.zeros(queries.shape, jnp.float32), jnp.full(queries.shape[:-1], MASKED, jnp.float32)


def add_piece(call: SplitAttention, blocks: Blocks, result: Result, number: Array | int, keys: KeyBlock) -> Result:
    """Let one block of queries read a piece of the keys.

    Args:
        call: The call.
        blocks: Blocks of queries.
        result: What all blocks have read so far.
        number: Which block reads.
        keys: The piece.

    Returns:
        The result after it.
    """
    query, start = blocks.of(number)
    segments = _segments(blocks, query, start, keys)
    piece = call.attend_piece(query, *keys[:2], segments, blocks.dropout, starts=(start, keys[2]))
    mixed, logsumexp = merge((result[0][number], result[1][number]), piece)
    return result[0].at[number].set(mixed), result[1].at[number].set(logsumexp)


def piece_gradients(
    call: SplitAttention, blocks: Blocks, result: Result, cotangent: Result, number: Array | int, keys: KeyBlock
) -> tuple[Array, Array, Array]:
    """Differentiate what one block of queries read in one piece of the keys.

    Args:
        call: The call.
        blocks: Blocks of queries.
        result: The final result of all blocks.
        cotangent: The cotangents of both its parts.
        number: Which block read.
        keys: The piece.

    Returns:
        The gradients of the block's queries, of the keys and of the values.
    """
    query, start = blocks.of(number)
    return call.piece_gradients(
        query,
        *keys[:2],
        _segments(blocks, query, start, keys),
        blocks.dropout,
        result=(result[0][number], result[1][number]),
        cotangent=(cotangent[0][number], cotangent[1][number]),
        starts=(start, keys[2]),
    )


def finished(mixed: Array, logsumexp: Array, shard: AttentionShard) -> list[Float[Array, "B C N H"]]:
    """Let the sinks join the softmax of each block and round to the dtype of the queries.

    Args:
        mixed: Mixed values of all blocks.
        logsumexp: Their log-sum-exp.
        shard: The call.
    """
    if shard.sinks is not None:
        sinks = shard.sinks
        mixed = jnp.stack([with_sinks(*block, sinks) for block in zip(mixed, logsumexp, strict=True)])
    return list(mixed.astype(shard.query.dtype))


def _segments(blocks: Blocks, query: Array, start: Array, keys: KeyBlock) -> tuple[Array | None, Array | None]:
    """Give the document numbers of a block of queries and of a piece of the keys."""
    own = segments_from(blocks.segments, start, query.shape[1])
    return own, segments_from(blocks.segments, keys[2], keys[0].shape[1])

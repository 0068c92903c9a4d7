"""One device's part of an attention call whose positions are split over the sequence axis.

Entry points: `SplitAttention`, what every device knows of the call, and `AttentionShard`, what one device holds.
"""

import dataclasses

import jax
from flax import struct

from dew.arrays import Array, Float, Int
from dew.kernels.attention import (
    Implementation,
    Visibility,
    attention,
    consecutive_visibility,
    partial_attention,
    partial_gradients,
)
from dew.kernels.dropout import AttentionDropout


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitAttention:
    """The call as every device knows it.

    Attributes:
        axis: Mesh axis that splits the positions.
        shards: Its size.
        scale: Factor on the logits.
        softcap: Bound of the logits; None leaves them.
        window: How many tokens a token reads, itself included; None means all before it.
        chunk: Length of the blocks of tokens that a token reads its own of; None means all.
        implementation: Kernel of `dew.kernels.attention`.
    """

    axis: str
    shards: int
    scale: float
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    implementation: Implementation = "auto"

    def index(self) -> Array:
        """Number of this device's slice."""
        return jax.lax.axis_index(self.axis)

    def attend(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H"],
        segments: tuple[Array | None, Array | None],
        sinks: Array | None,
        dropout: AttentionDropout | None,
        *,
        starts: tuple[Array | int, Array | int],
    ) -> Float[Array, "B T N H"]:
        """Attend from consecutive queries to all the keys they read.

        Args:
            query: Queries.
            key: Consecutive keys.
            value: Values.
            segments: Document numbers of the queries and of the keys.
            sinks: Logit of each of these heads; None means none.
            dropout: What drops probabilities of these rows and heads; None drops none.
            starts: Position of the first query and of the first key.

        Returns:
            The mixed values, in the dtype of `query`.
        """
        return attention(
            query,
            key.swapaxes(1, 2),
            value.swapaxes(1, 2),
            visibility=self._visibility(query, key, segments, starts),
            scale=self.scale,
            softcap=self.softcap,
            sinks=sinks,
            implementation=self.implementation,
            dropout=dropout,
        )

    def attend_piece(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H"],
        segments: tuple[Array | None, Array | None],
        dropout: AttentionDropout | None,
        *,
        starts: tuple[Array | int, Array | int],
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
        """Attend from consecutive queries to some of the keys they read; arguments as `attend`'s.

        Returns:
            The mixed values and the log-sum-exp of the logits, both float32.
        """
        visibility = self._visibility(query, key, segments, starts)
        pairs = key.swapaxes(1, 2), value.swapaxes(1, 2)
        return partial_attention(
            query, *pairs, visibility=visibility, scale=self.scale, softcap=self.softcap, dropout=dropout
        )

    def piece_gradients(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H"],
        segments: tuple[Array | None, Array | None],
        dropout: AttentionDropout | None,
        *,
        result: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]],
        cotangent: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]],
        starts: tuple[Array | int, Array | int],
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Differentiate what `attend_piece` adds to the result over all keys; other arguments as `attend`'s.

        Args:
            result: Mixed values and log-sum-exp over all keys.
            cotangent: The cotangents of both.

        Returns:
            The gradients of the queries, of these keys and of their values.
        """
        by_query, by_key, by_value = partial_gradients(
            query,
            key.swapaxes(1, 2),
            value.swapaxes(1, 2),
            result,
            cotangent,
            visibility=self._visibility(query, key, segments, starts),
            scale=self.scale,
            softcap=self.softcap,
            dropout=dropout,
        )
        return by_query, by_key.swapaxes(1, 2), by_value.swapaxes(1, 2)

    def _visibility(self, query: Array, key: Array, segments: tuple, starts: tuple) -> Visibility:
        return consecutive_visibility(
            query.shape[1],
            key.shape[1],
            query_start=starts[0],
            key_start=starts[1],
            query_segments=segments[0],
            key_segments=segments[1],
            window=self.window,
            chunk=self.chunk,
        )


@struct.dataclass
class AttentionShard:
    """The operands of one device.

    `T` is the whole length, `t = T / shards` that of one slice; heads are those of one tensor shard.

    Attributes:
        query: Rotated queries of this device's slice.
        key: Rotated keys of the slice.
        value: Values of the slice.
        segments: Document numbers of all positions, which every device holds; None when all are one document.
        sinks: Logit of each query head that joins its softmax without a value; None means none.
        dropout: What drops probabilities of this device's rows and heads; None drops none.
        call: What every device knows.
    """

    query: Float[Array, "B t N H"]
    key: Float[Array, "B t K H"]
    value: Float[Array, "B t K H"]
    segments: Int[Array, "#B T"] | None
    sinks: Float[Array, "N"] | None
    dropout: AttentionDropout | None
    call: SplitAttention = struct.field(pytree_node=False)

    @property
    def slice_length(self) -> int:
        """Positions of one slice."""
        return self.query.shape[1]


def segments_from(segments: Int[Array, "#B T"] | None, start: Array | int, length: int) -> Array | None:
    """Cut the document numbers of consecutive positions out of those of whole rows.

    Args:
        segments: Document numbers; None stays None.
        start: First position.
        length: How many.
    """
    if segments is None or length == segments.shape[1]:
        return segments
    return jax.lax.dynamic_slice_in_dim(segments, start, length, 1)

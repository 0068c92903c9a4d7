"""One device's part of an attention call whose positions are split over the sequence axis.

Entry point: `AttentionShard`, what every exchange receives inside the `shard_map`.
"""

import jax
from flax import struct

from dew.arrays import Array, Float, Int
from dew.kernels.attention import Implementation, attention, consecutive_visibility


@struct.dataclass
class AttentionShard:
    """The operands that one device holds, and what every device knows of the call.

    `T` is the whole length, `t = T / shards` that of one slice; heads are those of one tensor shard.

    Attributes:
        query: Rotated queries of this device's slice.
        key: Rotated keys of the slice.
        value: Values of the slice.
        segments: Document numbers of all positions, which every device holds; None when all are one document.
        sinks: Logit of each query head that joins its softmax without a value; None means none.
        axis: Mesh axis that splits the positions.
        shards: Its size.
        scale: Factor on the logits.
        softcap: Bound of the logits; None leaves them.
        window: How many tokens a token reads, itself included; None means all before it.
        chunk: Length of the blocks of tokens that a token reads its own of; None means all.
        implementation: Kernel of `dew.kernels.attention`.
    """

    query: Float[Array, "B t N H"]
    key: Float[Array, "B t K H"]
    value: Float[Array, "B t K H"]
    segments: Int[Array, "#B T"] | None
    sinks: Float[Array, "N"] | None
    axis: str = struct.field(pytree_node=False)
    shards: int = struct.field(pytree_node=False)
    scale: float = struct.field(pytree_node=False)
    softcap: float | None = struct.field(pytree_node=False, default=None)
    window: int | None = struct.field(pytree_node=False, default=None)
    chunk: int | None = struct.field(pytree_node=False, default=None)
    implementation: Implementation = struct.field(pytree_node=False, default="auto")

    @property
    def slice_length(self) -> int:
        """Positions of one slice."""
        return self.query.shape[1]

    def index(self) -> Array:
        """Number of this device's slice."""
        return jax.lax.axis_index(self.axis)

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        first_query: Array | int,
        first_key: Array | int,
        sinks: Array | None,
    ) -> Float[Array, "B t N H"]:
        """Attend from consecutive queries to consecutive keys.

        Args:
            query: Queries [B, T', N', H].
            key: Keys [B, S', K', H].
            value: Values, likewise.
            first_query: Position of the first query.
            first_key: Position of the first key.

            sinks: Logit of each of these heads; None means none.

        Returns:
            The mixed values, shaped as `query`.
        """
        visibility = consecutive_visibility(
            query.shape[1],
            key.shape[1],
            query_start=first_query,
            key_start=first_key,
            query_segments=self._segments_from(first_query, query.shape[1]),
            key_segments=self._segments_from(first_key, key.shape[1]),
            window=self.window,
            chunk=self.chunk,
        )
        return attention(
            query,
            key.swapaxes(1, 2),
            value.swapaxes(1, 2),
            visibility=visibility,
            scale=self.scale,
            softcap=self.softcap,
            sinks=sinks,
            implementation=self.implementation,
        )

    def _segments_from(self, first: Array | int, length: int) -> Array | None:
        if self.segments is None or length == self.segments.shape[1]:
            return self.segments
        return jax.lax.dynamic_slice_in_dim(self.segments, first, length, 1)

"""What an attention call on a sequence mesh sends: its sizes, and one record per kind of collective.

Entry points: `AttentionSizes`, `Transfer`; each exchange has a function from the first to a tuple of the second.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

Kind = Literal["all-to-all", "all-gather", "reduce-scatter", "collective-permute"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """The facts of one attention call that decide how it is exchanged.

    Attributes:
        rows: Rows B on one device.
        num_queries: Positions T of the queries, all slices together.
        num_keys: Positions S of the keys.
        num_heads: Query heads N of one tensor shard.
        num_kv_heads: Key/value heads K that those read.
        head_dim: Width H of a head.
        dtype: Compute dtype.
        shards: Devices that split the positions.
        is_masked: Whether documents or validity hide further keys.
        has_sinks: Whether a logit per head joins the softmax.
        has_softcap: Whether the logits are bounded.
        has_dropout: Whether probabilities are dropped.
        window: How many tokens a token reads, itself included; None means all before it.
        chunk: Length of the blocks of tokens that a token reads its own of; None means all.
    """

    rows: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    shards: int
    is_masked: bool = False
    has_sinks: bool = False
    has_softcap: bool = False
    has_dropout: bool = False
    window: int | None = None
    chunk: int | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of a number in the compute dtype."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def slice_length(self) -> int:
        """Positions of one slice."""
        return self.num_queries // self.shards

    @property
    def query_bytes(self) -> int:
        """Bytes of one slice of queries, or of mixed values."""
        return self.rows * self.slice_length * self.num_heads * self.head_dim * self.item_bytes

    @property
    def key_bytes(self) -> int:
        """Bytes of one slice of keys, or of values."""
        return self.rows * (self.num_keys // self.shards) * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def wide_key_bytes(self) -> int:
        """Bytes of the same slice in float32, as gradients are that several devices add to."""
        return self.key_bytes // self.item_bytes * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Collectives of one kind over the sequence axis.

    Attributes:
        kind: Which collective.
        result_bytes: Bytes of all their results on one device, as the compiled program states them.
        shards: Devices that take part.
        in_backward: Whether they belong to the backward pass.
    """

    kind: Kind
    result_bytes: int
    shards: int
    in_backward: bool = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends to others; for a permute, at most."""
        if self.kind == "collective-permute":
            return self.result_bytes
        if self.kind == "reduce-scatter":
            return self.result_bytes * (self.shards - 1)
        return self.result_bytes * (self.shards - 1) // self.shards


def sent_bytes(transfers: tuple[Transfer, ...]) -> int:
    """Add up what a device sends in the forward and the backward pass.

    Args:
        transfers: The collectives of a call.
    """
    return sum(transfer.sent_bytes for transfer in transfers)

"""Attention with split queries beside whole keys and values, for any number of heads.

Entry point: `gather_attention`. Queries are striped so that causal work is equal on every device.
"""

import jax

from dew.arrays import Array, Float
from dew.parallel.attention_shard import AttentionShard
from dew.parallel.stripes import from_stripes, stripe_starts, to_stripes


def gather_attention(shard: AttentionShard) -> Float[Array, "B t N H"]:
    """Attend from two chunks of queries to the gathered keys and values.

    Args:
        shard: This device's part, of an even number of positions.

    Returns:
        The mixed values of this device's positions.
    """
    key, value = (jax.lax.all_gather(x, shard.axis, axis=1, tiled=True) for x in (shard.key, shard.value))
    chunks = to_stripes(shard.query, shard.axis, shard.shards)
    starts = stripe_starts(shard.index(), shard.slice_length, shard.shards)
    early, late = (
        shard.attend(chunk, key, value, first_query=start, first_key=0, sinks=shard.sinks)
        for chunk, start in zip(chunks, starts, strict=True)
    )
    return from_stripes(early, late, shard.axis, shard.shards)

"""Attention whose keys and values go round the devices, one slice at a time.

Entry points: `ring_attention` (https://arxiv.org/abs/2310.01889), `ring_transfers`, `ring_hops`. With a slice of q
bytes of queries, k of keys and k32 of keys in float32, and R hops: permutes of 2 R k bytes, backward
2 R k + 2 (R + 1) k32; a call without window or chunks also stripes, 2 q + 2 k more both ways.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.parallel.attention_shard import AttentionShard, SplitAttention
from dew.parallel.pieces import Blocks, Result, add_piece, finished, no_pieces, piece_gradients
from dew.parallel.stripes import from_stripes, stripe_bytes, stripe_starts, to_stripes
from dew.parallel.traffic import AttentionSizes, Transfer

Pair = tuple[Float[Array, "P B C K H"], Float[Array, "P B C K H"]]
"""The blocks of keys and of values of one slice."""


def ring_attention(shard: AttentionShard) -> Float[Array, "B t N H"]:
    """Attend from this device's queries to each slice of keys as it passes; a device holds two slices at most.

    Where a query reads all keys before it, slices are striped, so that every device computes two halves of a slice at
    every hop: 2 N + 1 of the 4 N pairs of half slices. With a window or chunks they stay in order and the ring ends
    where no query reads further back: R + 1 of N pairs of slices. A query and a key cost 14 H operations.

    Args:
        shard: This device's part; of an even number of positions where it is striped.

    Returns:
        The mixed values of this device's positions.
    """
    call = shard.call
    is_striped = ring_stripes(call.window, call.chunk)
    query, *keys = (_blocks(x, call, is_striped) for x in (shard.query, shard.key, shard.value))
    starts = _starts(call, call.index(), shard.slice_length, is_striped)
    mixed, logsumexp = _attend(call, query, tuple(keys), starts, shard.segments, shard.dropout)
    first, *second = finished(mixed, logsumexp, shard)
    return from_stripes(first, second[0], call.axis, call.shards) if is_striped else first


def ring_transfers(sizes: AttentionSizes) -> tuple[Transfer, ...]:
    """List what the exchange sends.

    Args:
        sizes: The call.
    """
    hops = ring_hops(sizes.slice_length, sizes.shards, sizes.window, sizes.chunk)
    stripes = 0
    if ring_stripes(sizes.window, sizes.chunk):
        stripes = 2 * stripe_bytes(sizes.query_bytes + sizes.key_bytes, sizes.shards)
    forward = 2 * hops * sizes.key_bytes
    backward = forward + 2 * (hops + 1) * sizes.wide_key_bytes
    return tuple(
        Transfer(kind="collective-permute", result_bytes=size + stripes, shards=sizes.shards, in_backward=is_backward)
        for size, is_backward in ((forward, False), (backward, True))
    )


def ring_hops(slice_length: int, shards: int, window: int | None, chunk: int | None) -> int:
    """Count how often the keys move on: N - 1 times, less where a window or chunks end earlier.

    Args:
        slice_length: Positions of a slice.
        shards: Devices N.
        window: How many tokens a token reads; None means all before it.
        chunk: Length of the blocks it reads its own of; None means all.
    """
    spans = [span for span in (window, chunk) if span is not None]
    return min([shards - 1, *(-(-(span - 1) // slice_length) for span in spans)])


def ring_stripes(window: int | None, chunk: int | None) -> bool:
    """Say whether the ring stripes a call: where nothing but order limits what a query reads."""
    return window is None and chunk is None


def _blocks(x: Array, call: SplitAttention, is_striped: bool) -> Array:
    return jnp.stack(to_stripes(x, call.axis, call.shards)) if is_striped else x[None]


def _starts(call: SplitAttention, index: Array, slice_length: int, is_striped: bool) -> Array:
    """Give the position of the first token of each block of a device."""
    if is_striped:
        return jnp.stack(stripe_starts(index, slice_length, call.shards))
    return (index * slice_length)[None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: SplitAttention, queries: Array, keys: Pair, starts: Array, segments: Any, dropout: Any) -> Result:
    blocks = Blocks(queries, starts, segments, dropout)

    def visit(result: Result, keys: Pair, hop: Array | int, pairs: Array) -> Result:
        def step(result: Result, pair: Array) -> tuple[Result, None]:
            return add_piece(call, blocks, result, pair[0], _block_of(call, keys, hop, pair[1])), None

        return jax.lax.scan(step, result, pairs)[0]

    def hop(carry: tuple[Result, Pair], number: Array) -> tuple[tuple[Result, Pair], None]:
        result, keys = carry
        keys = _moved(keys, call, 1)
        return (visit(result, keys, number, _pairs(call, keys, number)), keys), None

    result = visit(no_pieces(queries), keys, 0, _first_pairs(keys))
    (result, _), _ = jax.lax.scan(hop, (result, keys), jnp.arange(1, _hops(call, keys) + 1))
    return result


def _attend_forward(call, queries, keys, starts, segments, dropout):
    result = _attend(call, queries, keys, starts, segments, dropout)
    return result, (Blocks(queries, starts, segments, dropout), keys, result)


def _attend_backward(call, residuals, cotangent):
    blocks, keys, result = residuals

    def visit(sums, keys, hop, pairs):
        def step(sums, pair):
            block = _block_of(call, keys, hop, pair[1])
            parts = piece_gradients(call, blocks, result, cotangent, pair[0], block)
            places = (pair[0], pair[1], pair[1])
            return tuple(
                total.at[place].add(part.astype(total.dtype))
                for total, place, part in zip(sums, places, parts, strict=True)
            ), None

        return jax.lax.scan(step, sums, pairs)[0]

    def hop(carry, number):
        # The sums travel with the keys they belong to.
        (by_queries, *by_keys), keys = carry
        keys, by_keys = _moved((keys, by_keys), call, 1)
        sums = visit((by_queries, *by_keys), keys, number, _pairs(call, keys, number))
        return (sums, keys), None

    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (blocks.queries, *keys))
    sums = visit(sums, keys, 0, _first_pairs(keys))
    hops = _hops(call, keys)
    (sums, _), _ = jax.lax.scan(hop, (sums, keys), jnp.arange(1, hops + 1))
    by_keys = _moved(sums[1:], call, -hops)
    pair = tuple(x.astype(like.dtype) for x, like in zip(by_keys, keys, strict=True))
    return sums[0].astype(blocks.queries.dtype), pair, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _hops(call: SplitAttention, keys: Pair) -> int:
    return ring_hops(keys[0].shape[0] * keys[0].shape[2], call.shards, call.window, call.chunk)


def _first_pairs(keys: Pair) -> Array:
    """Which block of queries reads which block of the device's own keys."""
    return jnp.array([(0, 0)] if len(keys[0]) == 1 else [(0, 0), (1, 0), (1, 1)])


def _pairs(call: SplitAttention, keys: Pair, hop: Array) -> Array:
    """Which block of queries reads which block of the keys that come from `hop` devices before.

    Of the striped ones the late queries read all early keys; besides, the early queries read the early keys of a device
    before them, or the late queries the late keys of a device after them.
    """
    if len(keys[0]) == 1:
        return jnp.zeros((1, 2), jnp.int32)
    other = jnp.where(call.index() >= hop, 0, 1)
    return jnp.stack([jnp.array([1, 0]), jnp.stack([other, other])])


def _block_of(call: SplitAttention, keys: Pair, hop: Array | int, number: Array) -> tuple[Array, Array, Array]:
    """Give a block of the keys that come from `hop` devices before, and its position."""
    source = (call.index() - hop) % call.shards
    count, length = len(keys[0]), keys[0].shape[2]
    starts = _starts(call, source, count * length, count == 2)
    return keys[0][number], keys[1][number], starts[number]


def _moved(x, call: SplitAttention, hops: int):
    """Send arrays to the device `hops` further on."""
    to = [(device, (device + hops) % call.shards) for device in range(call.shards)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, call.axis, to), x)

"""Tokens to the devices that hold their experts and back, on the mesh's expert axis, without dropping any.

Entry point: `exchanged`. A token goes once to each device that holds one of its experts, whatever their number there,
and comes back as one partial sum. Shapes are static, so a device sends each peer shares of `share_of` slots: the first
holds all of an even routing, further ones follow in a loop while any device has tokens left.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float, Int

Apply = Callable[[Array, Array, Array, Any], Array]
"""Tokens [M, D], local expert numbers [M, K], weights [M, K] and the device's banks to sums [M, D]."""


def share_of(num_tokens: int, top_k: int, devices: int) -> int:
    """Count the slots for each peer in one share: what an even routing fills, at most one slot a token.

    Args:
        num_tokens: Tokens on a device.
        top_k: Experts of a token.
        devices: Devices of the expert axis.
    """
    even = -(-num_tokens * min(top_k, devices) // devices)
    return min(num_tokens, -(-even // 8) * 8)


def share_bytes(num_tokens: int, top_k: int, devices: int, width: int, item_bytes: int) -> tuple[int, int, int]:
    """Count the bytes of the results of one share's collectives on one device; (devices - 1) / devices are sent.

    Args:
        num_tokens: Tokens on a device.
        top_k: Experts of a token.
        devices: Devices of the expert axis.
        width: Width D of a token.
        item_bytes: Bytes of a number of it.

    Returns:
        Those of the forward pass, of the backward pass of the first share, and of that of a further one.
    """
    slots = devices * share_of(num_tokens, top_k, devices)
    there, back = width * item_bytes + 8 * top_k, width * item_bytes
    cotangents = 2 * width * item_bytes + 4 * top_k
    return slots * (there + back), slots * cotangents, slots * (there + cotangents)


def exchanged(
    x: Float[Array, "N D"],
    experts: Int[Array, "N K"],
    weights: Float[Array, "N K"],
    banks: Any,
    apply: Apply,
    *,
    axis: str,
    experts_per_device: int,
    lockstep: tuple[str, ...],
) -> Float[Array, "N D"]:
    """Apply each token's experts wherever they are. Runs inside a shard_map that is manual over `axis`.

    Bytes of the results on one device, with P devices, C slots in a share, width D, K experts a token and s bytes an
    element: a share brings P C (D s + 8 K) there (tokens, expert numbers, weights) and P C D s back; of them
    (P - 1) / P come from other devices (`share_bytes`). The backward pass of the first share sends both cotangents,
    P C (2 D s + 4 K); that of a further share sends the tokens there once more. `jax.lax.ragged_all_to_all`
    would send what is routed and no more, but does not lower on CPU, where everything here is tested. What `apply` gets
    has room for each of the P C tokens to choose all its K experts here: P C K rows, of which an even routing fills
    about N K.

    Args:
        x: Tokens of this device.
        experts: Expert of each slot among all devices' experts; a number past the last marks a slot without one.
        weights: Weight of each slot.
        banks: This device's experts.
        apply: Computes the sums of tokens over this device's experts.
        axis: Name of the expert axis.
        experts_per_device: Experts on each device.
        lockstep: Axes whose devices make the same number of rounds; no device may leave the loop before its peers.

    Returns:
        The sums over all experts of each token, in the dtype of what `apply` gives.
    """
    devices = jax.lax.axis_size(axis)
    share = share_of(x.shape[0], experts.shape[1], devices)
    owner = experts // experts_per_device
    hits = jnp.any(owner[:, :, None] == jnp.arange(devices), axis=1)
    place = jnp.where(hits, jnp.cumsum(hits, axis=0, dtype=jnp.int32) - 1, _NOWHERE)
    route = (experts, place, _queues(place, share))

    def one(number: Array | int, x: Array, weights: Array, banks: Any, route: Any) -> Array:
        return _round(number, x, weights, banks, route, apply, axis, experts_per_device, share)

    out = one(0, x, weights, banks, route)
    if share >= x.shape[0]:
        return out
    longest = jax.lax.pmax(jnp.max(jnp.sum(hits, axis=0, dtype=jnp.int32)), lockstep)
    return out + _further(one)(x, weights, banks, route, -(-longest // share))


_NOWHERE = 2**30
"""Place of a token that does not go to a device; past the end of every share."""


def _queues(place: Int[Array, "N P"], share: int) -> Int[Array, "P _"]:
    """List the tokens that go to each device, in order, filled up with a number that is no token's."""
    count, devices = place.shape
    length = -(-count // share) * share
    queue = jnp.full((devices, length), count, jnp.int32)
    tokens = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[:, None], place.shape)
    return queue.at[jnp.arange(devices)[None], place].set(tokens, mode="drop")


def _round(
    number: Any, x: Array, weights: Array, banks: Any, route: Any, apply: Apply, axis: str, per_device: int, share: int
) -> Array:
    """Send one share to each peer, compute, bring the sums back."""
    experts, place, queues = route
    taken = jax.lax.dynamic_slice_in_dim(queues, number * share, share, axis=1)
    offset = place - number * share
    offset = jnp.where((offset >= 0) & (offset < share), offset, share)
    devices = jnp.arange(taken.shape[0])[:, None, None]
    local = experts.at[taken].get(mode="fill", fill_value=_NOWHERE) - devices * per_device
    local = jnp.where((local >= 0) & (local < per_device), local, per_device)
    sent = (_sent(x, taken, offset), local, _sent(weights, taken, offset))
    tokens, numbers, factors = (_swapped(each, axis).reshape(-1, each.shape[-1]) for each in sent)
    summed = apply(tokens, numbers, factors, banks)
    back = _swapped(summed.reshape(*taken.shape, -1).astype(x.dtype), axis)
    return _returned(back, taken, offset).astype(summed.dtype)


def _swapped(parts: Array, axis: str) -> Array:
    """Give part p to device p and take from each what it has for this one."""
    return jax.lax.all_to_all(parts, axis, split_axis=0, concat_axis=0, tiled=True)


# To a share and from it: each is the other's transpose, and both only gather.
@jax.custom_vjp
def _sent(x: Array, taken: Array, offset: Array) -> Array:
    return x.at[taken].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _returned(parts: Array, taken: Array, offset: Array) -> Array:
    total = jnp.zeros((offset.shape[0], parts.shape[-1]), jnp.float32)
    for device in range(parts.shape[0]):  # in one order, so that rounding does not depend on who answers first
        total = total + parts[device].at[offset[:, device]].get(mode="fill", fill_value=0)
    return total


_sent.defvjp(
    lambda x, taken, offset: (_sent(x, taken, offset), (taken, offset)),
    lambda route, cotangent: (_returned(cotangent, *route).astype(cotangent.dtype), None, None),
)


def _returned_forward(parts, taken, offset):
    return _returned(parts, taken, offset), (taken, offset, jnp.zeros((), parts.dtype))


def _returned_backward(residuals, cotangent):
    taken, offset, like = residuals
    return _sent(cotangent.astype(like.dtype), taken, offset), None, None


_returned.defvjp(_returned_forward, _returned_backward)


def _further(one: Callable[..., Array]) -> Callable[..., Array]:
    """Sum the rounds after the first; each is computed again in the backward pass, since nobody knows their number."""

    @jax.custom_vjp
    def run(x, weights, banks, route, rounds):
        empty = jnp.zeros(jax.eval_shape(one, 0, x, weights, banks, route).shape, jnp.float32)
        return jax.lax.fori_loop(1, rounds, lambda number, out: out + one(number, x, weights, banks, route), empty)

    def forward(x, weights, banks, route, rounds):
        return run(x, weights, banks, route, rounds), (x, weights, banks, route, rounds)

    def backward(residuals, cotangent):
        x, weights, banks, route, rounds = residuals

        def step(number, sums):
            pull = jax.vjp(lambda x, weights, banks: one(number, x, weights, banks, route), x, weights, banks)[1]
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, pull(cotangent))

        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (x, weights, banks))
        sums = jax.lax.fori_loop(1, rounds, step, empty)
        given = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, (x, weights, banks))
        return (*given, None, None)

    run.defvjp(forward, backward)
    return run

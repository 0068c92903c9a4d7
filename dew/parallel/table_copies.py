"""A token table used many times in one step: gathered once, its gradient summed over devices once.

Entry points: `copies_of`, `look_up`, `copied_token_loss`. A copy is one device's own; its gradient stays on the device
until the transpose of `copies_of` adds all of them. Bytes per step and device, with table H: H to gather it, H to sum
its gradients, whatever the number of uses. A device holds both, whole, from the first use to the last.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from dew.arrays import Array, Float, Int
from dew.kernels.token_loss import token_loss, token_loss_and_gradients
from dew.parallel.vocabulary import HEAD_NAMES, TOKEN_NAMES
from dew.placement.rules import DEFAULT_RULES, resolve, spec_axes

ROW_NAMES = ("activation_batch", "activation_length")


def copies_of(mesh: Any, table: Float[Array, "V D"], shape: tuple[int, int]) -> Float[Array, "devices V D"]:
    """Give each device that scores tokens a copy of a table.

    Args:
        mesh: The abstract mesh in context.
        table: The table, in its stored parts.
        shape: Rows and positions of the arrays that it will be used for.

    Returns:
        The copies, one a device.
    """
    return _copied(table, mesh, shape)


def pinned_copies(mesh: Any, copies: Float[Array, "devices V D"], shape: tuple[int, int]) -> Array:
    """Keep each copy, or its gradient, on its device; arguments as those of `copies_of`."""
    axes = spec_axes(_spec(mesh, TOKEN_NAMES, shape))
    return jax.lax.with_sharding_constraint(copies, NamedSharding(mesh, PartitionSpec(axes or None)))


def look_up(mesh: Any, copies: Float[Array, "devices V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Look up the rows of tokens in each device's copy; backward, each device adds up its own tokens.

    Args:
        mesh: The abstract mesh in context.
        copies: What `copies_of` gave.
        tokens: Token ids.
    """
    return _look_up(copies, tokens, mesh, _spec(mesh, ROW_NAMES, tokens.shape), _spec(mesh, TOKEN_NAMES, tokens.shape))


def copied_token_loss(
    mesh: Any,
    hidden: Float[Array, "B T D"],
    copies: Float[Array, "devices V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Compute `dew.parallel.vocabulary.sharded_token_loss` with copies of the head; only three numbers travel."""
    return _scored(hidden, copies, targets, weights, mesh, _spec(mesh, TOKEN_NAMES, targets.shape), softcap, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copied(table, mesh, shape):
    axes = spec_axes(_spec(mesh, TOKEN_NAMES, shape))
    whole = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, PartitionSpec()))
    count = math.prod(mesh.shape[axis] for axis in axes)
    return pinned_copies(mesh, jnp.broadcast_to(whole[None], (count, *table.shape)), shape)


def _copied_forward(table, mesh, shape):
    return _copied(table, mesh, shape), None


def _copied_backward(mesh, shape, residuals, cotangent):
    stored = NamedSharding(mesh, _spec(mesh, HEAD_NAMES, cotangent.shape[1:]))
    return (jax.lax.with_sharding_constraint(jnp.sum(cotangent, axis=0), stored),)


_copied.defvjp(_copied_forward, _copied_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _look_up(copies, tokens, mesh, rows, spread):
    take = lambda copy, tokens: jnp.take(copy[0], tokens, axis=0)  # noqa: E731
    places = (PartitionSpec(spec_axes(spread) or None), rows)
    return jax.shard_map(take, mesh=mesh, in_specs=places, out_specs=rows, check_vma=False)(copies, tokens)


def _look_up_forward(copies, tokens, mesh, rows, spread):
    return _look_up(copies, tokens, mesh, rows, spread), (tokens, jnp.zeros((copies.shape[1], 0), copies.dtype))


def _look_up_backward(mesh, rows, spread, residuals, cotangent):
    tokens, like = residuals

    def add(tokens, cotangent):
        zero = jnp.zeros((like.shape[0], cotangent.shape[-1]), jnp.float32)
        return zero.at[tokens].add(cotangent.astype(jnp.float32)).astype(like.dtype)[None]

    places = PartitionSpec(spec_axes(spread) or None)
    run = jax.shard_map(add, mesh=mesh, in_specs=(spread, spread), out_specs=places, check_vma=False)
    return run(tokens, cotangent), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _scored(hidden, copies, targets, weights, mesh, spread, softcap, scale):
    axes = spec_axes(spread)

    def score(hidden, copy, targets, weights):
        sums = token_loss(*_flat(hidden, copy, targets, weights), softcap=softcap, scale=scale)
        return jax.lax.psum((*sums, jnp.sum(weights)), axes)

    places = (spread, PartitionSpec(axes or None), spread, spread)
    run = jax.shard_map(score, mesh=mesh, in_specs=places, out_specs=PartitionSpec(), check_vma=False)
    return run(hidden, copies, targets, weights)


def _scored_forward(hidden, copies, targets, weights, mesh, spread, softcap, scale):
    axes = spec_axes(spread)

    def score(hidden, copy, targets, weights):
        flat = _flat(hidden, copy, targets, weights)
        loss, correct, by_hidden, by_copy = token_loss_and_gradients(*flat, softcap=softcap, scale=scale)
        sums = jax.lax.psum((loss, correct, jnp.sum(weights)), axes)
        return sums, by_hidden.reshape(hidden.shape), by_copy.astype(copy.dtype)[None]

    held = PartitionSpec(axes or None)
    places = (spread, held, spread, spread)
    run = jax.shard_map(score, mesh=mesh, in_specs=places, out_specs=(PartitionSpec(), spread, held), check_vma=False)
    sums, by_hidden, by_copies = run(hidden, copies, targets, weights)
    return sums, (by_hidden, by_copies)


def _scored_backward(mesh, spread, softcap, scale, gradients, cotangents):
    by_hidden, by_copies = (gradient * cotangents[0].astype(gradient.dtype) for gradient in gradients)
    return by_hidden, by_copies, None, None


_scored.defvjp(_scored_forward, _scored_backward)


def _flat(hidden: Array, copy: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array, Array]:
    return hidden.reshape(-1, hidden.shape[-1]), copy[0], targets.reshape(-1), weights.reshape(-1)


def _spec(mesh: Any, names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    return resolve(names, shape, mesh, nn.get_logical_axis_rules() or DEFAULT_RULES).spec

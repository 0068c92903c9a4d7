"""The token cross entropy on a mesh: each device scores its own tokens with the whole head.

Entry point: `sharded_token_loss`. Bytes per step and device, with head H and n devices that hold tokens: H to
gather the head, H (n - 1) / n to scatter its gradient's sums, three numbers for the loss. Logits never travel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from dew.arrays import Array, Float, Int
from dew.kernels.token_loss import token_cross_entropy, token_loss, token_loss_and_gradients
from dew.placement.rules import DEFAULT_RULES, resolve

TOKEN_NAMES = ("activation_batch", "activation_spread")
"""Rows over the axes of the batch, positions over sequence and tensor: every device gets tokens of its own."""
HEAD_NAMES = ("vocab", "embed")


def sharded_token_loss(
    mesh: Any,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Sum the weighted cross entropies of all tokens on a mesh, in nats.

    Differentiable with respect to `hidden` and `head`; the gradient by the head arrives in the head's own parts.

    Args:
        mesh: The mesh, concrete or abstract; None or an empty one means one device.
        hidden: Output of the last norm, in the compute dtype.
        head: Vocabulary matrix in its storage dtype.
        targets: Token to predict at each position.
        weights: Weight of each position; 0 leaves it out.
        softcap: Bound of the logits; None leaves them.
        scale: Factor on the logits.

    Returns:
        The weighted sum of the cross entropies, the weighted count of tokens that no other token outscores, and the sum
        of the weights.
    """
    if mesh is None or mesh.empty or mesh.size == 1:
        flat = hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1), weights.reshape(-1)
        return *token_cross_entropy(*flat, softcap=softcap, scale=scale), jnp.sum(weights)
    rules = nn.get_logical_axis_rules() or DEFAULT_RULES
    tokens = resolve(TOKEN_NAMES, targets.shape, mesh, rules).spec
    stored = resolve(HEAD_NAMES, head.shape, mesh, rules).spec
    return _sharded(hidden, head, targets, weights, mesh, tokens, stored, softcap, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def _sharded(hidden, head, targets, weights, mesh, tokens, stored, softcap, scale):
    axes = _axes_of(tokens)

    def score(hidden, head, targets, weights):
        flat = hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1), weights.reshape(-1)
        # One reduction for all three: XLA on CPU may run a reduction of the weights alone beside a loop over layers, in
        # another order on each device, which ends in a deadlock.
        return jax.lax.psum((*token_loss(*flat, softcap=softcap, scale=scale), jnp.sum(weights)), axes)

    specs = (tokens, PartitionSpec(), tokens, tokens)
    run = jax.shard_map(score, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return run(hidden, head.astype(hidden.dtype), targets, weights)


def _forward(hidden, head, targets, weights, mesh, tokens, stored, softcap, scale):
    axes = _axes_of(tokens)
    parts = PartitionSpec(*(tuple(axis for axis in _entry(dim) if axis in axes) or None for dim in stored))

    def score(hidden, head, targets, weights):
        flat = hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1), weights.reshape(-1)
        loss, correct, by_hidden, by_head = token_loss_and_gradients(*flat, softcap=softcap, scale=scale)
        loss, correct, mass = jax.lax.psum((loss, correct, jnp.sum(weights)), axes)
        return loss, correct, mass, by_hidden.reshape(hidden.shape), _summed_parts(by_head, parts, axes)

    specs = (tokens, PartitionSpec(), tokens, tokens)
    outputs = (PartitionSpec(), PartitionSpec(), PartitionSpec(), tokens, parts)
    run = jax.shard_map(score, mesh=mesh, in_specs=specs, out_specs=outputs, check_vma=False)
    loss, correct, mass, by_hidden, by_head = run(hidden, head.astype(hidden.dtype), targets, weights)
    return (loss, correct, mass), (by_hidden, by_head.astype(head.dtype))


def _backward(mesh, tokens, stored, softcap, scale, gradients, cotangents):
    by_hidden, by_head = (gradient * cotangents[0].astype(gradient.dtype) for gradient in gradients)
    return by_hidden, by_head, None, None


_sharded.defvjp(_forward, _backward)


def _summed_parts(gradient: Array, parts: PartitionSpec, axes: tuple[str, ...]) -> Array:
    """Sum a whole gradient over the devices that hold tokens, leaving each its own part."""
    for dim, entry in enumerate(parts):
        for axis in _entry(entry):
            gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=dim, tiled=True)
    rest = tuple(axis for axis in axes if axis not in _axes_of(parts))
    return jax.lax.psum(gradient, rest) if rest else gradient


def _entry(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in _entry(entry))

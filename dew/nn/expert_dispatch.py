"""Routes tokens on any mesh: who holds which tokens and which experts, and what the router says, summed over devices.

Entry point: `routed`. Everything between the router and the sums runs in one shard_map: tokens stay where they are but
for the exchange over the expert axis (`dew.parallel.expert_exchange`); tokens that are whole on that axis, as in
decoding few rows, are computed by each device with its own experts and added up.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dew.arrays import Array
from dew.kernels.expert_mixture import ExpertActivation, expert_mixture
from dew.nn.mlp import ACTIVATIONS
from dew.nn.router import BALANCE_BIAS, Choice, Routing, choose, excess_load, routing_sums
from dew.nn.sharding import activation_spec, is_trivial_mesh, weight_spec
from dew.parallel.expert_exchange import exchanged
from dew.placement.layout import LayoutRefused
from dew.placement.rules import spec_axes

TOKEN_NAMES = ("activation_batch", "activation_length", "activation_embed")
BANK_NAMES = {
    **dict.fromkeys(("gate_proj", "up_proj"), ("exp", "embed", "mlp")),
    "down_proj": ("exp", "mlp", "embed"),
    **dict.fromkeys(("gate_proj_bias", "up_proj_bias"), ("exp", "mlp")),
    "down_proj_bias": ("exp", "embed"),
}


def routed(
    x: Array,
    weights: Mapping[str, Mapping[str, Array]],
    spec: Any,
    is_token: Array | None,
    counted: Array | None,
    documents: Array | None,
) -> tuple[Array, Routing | None]:
    """Route tokens and compute their experts.

    Args:
        x: Tokens [B, T, D].
        weights: `router` and `experts`, as `Experts` declares them, whole over fsdp.
        spec: An `ExpertsSpec`.
        is_token: As `Experts`.
        counted: As `Experts`.
        documents: As `Experts`.

    Returns:
        The experts' sums, [B, T, D] in the dtype of `x`, and the statistics where tokens are counted.

    Raises:
        LayoutRefused: If the mesh's expert axis does not divide the experts.
    """
    bins = 1 if documents is None else x.shape[1]
    given = {"is_token": is_token, "counted": counted, "documents": documents}
    extra = {name: value for name, value in given.items() if value is not None}
    mesh = jax.sharding.get_abstract_mesh()
    if is_trivial_mesh(mesh):
        out, routing = _local(x, weights, extra, spec=spec, bins=bins, axes=_Axes())
        return out, _with_bias_term(routing, weights["router"])
    tokens = activation_spec(TOKEN_NAMES, x.shape)
    banks = {name: weight_spec(BANK_NAMES[name], leaf.shape) for name, leaf in weights["experts"].items()}
    axes = _Axes.of(mesh, tokens, banks["gate_proj"], spec.num_experts)
    rows = PartitionSpec(*tokens[:2])
    run = jax.shard_map(
        functools.partial(_local, spec=spec, bins=bins, axes=axes),
        in_specs=(tokens, {"router": PartitionSpec(), "experts": banks}, rows),
        out_specs=(tokens, PartitionSpec()),
        axis_names=set(axes.manual),
        check_vma=False,
    )
    out, routing = run(x, weights, extra)
    return out, _with_bias_term(routing, weights["router"])


def _with_bias_term(routing: Routing | None, router: Mapping[str, Array]) -> Routing | None:
    """Add the balance biases' gradient, outside of the shard_map: its transpose divides by devices and sums again."""
    if routing is None or BALANCE_BIAS not in router:
        return routing
    return routing.replace(bias_term=excess_load(router[BALANCE_BIAS].astype(jnp.float32), routing.load))


class _Axes:
    """Mesh axes by what they split: rows, positions, experts, hidden width.

    Attributes:
        rows: Axes of the batch.
        length: Axes of the positions.
        expert: "expert" where experts are split, else None.
        exchanges: Whether tokens are split over it too.
        width: Axes that split the experts' hidden width.
        manual: All axes of the mesh that are not manual already.
    """

    def __init__(
        self,
        rows: tuple[str, ...] = (),
        length: tuple[str, ...] = (),
        expert: str | None = None,
        width: tuple[str, ...] = (),
        manual: tuple[str, ...] = (),
    ):
        self.rows, self.length, self.expert, self.width, self.manual = rows, length, expert, width, manual
        self.exchanges = expert in rows

    @classmethod
    def of(cls, mesh: Any, tokens: PartitionSpec, bank: PartitionSpec, num_experts: int) -> "_Axes":
        """Read the axes off the specs of tokens [B, T, D] and of a bank [E, D, F]."""
        by_token, by_bank = (*tokens, None, None, None), (*bank, None, None, None)
        size = mesh.shape["expert"]
        if size > 1 and num_experts % size:
            divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise LayoutRefused(
                f"expert={size} does not divide the {num_experts} experts of a layer. Use MeshSpec(expert=N) with N "
                f"one of {divisors}, and fsdp for the rest of the devices."
            )
        axes = lambda entry: spec_axes(PartitionSpec(entry))  # noqa: E731
        if axes(by_bank[0]) not in ((), ("expert",)):
            raise LayoutRefused(
                f"The rules put the experts of a layer on {axes(by_bank[0])}; tokens are exchanged over 'expert' "
                "alone. Use the rule ('exp', 'expert'), and tensor for the experts' hidden width."
            )
        return cls(
            rows=axes(by_token[0]),
            length=axes(by_token[1]),
            expert="expert" if "expert" in axes(by_bank[0]) else None,
            width=axes(by_bank[2]),
            manual=tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes),
        )


def _local(x: Array, weights: Any, extra: Mapping[str, Array], *, spec: Any, bins: int, axes: _Axes) -> Any:
    """Route the tokens of one device; `axes` is empty where there is only one."""
    shape = x.shape
    flat = x.reshape(-1, shape[-1])
    router = weights["router"]
    logits = jnp.matmul(
        flat.astype(jnp.float32), router["kernel"].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    if "bias" in router:
        logits = logits + router["bias"].astype(jnp.float32)
    choice = choose(logits, router.get(BALANCE_BIAS), spec.router)
    kept = jnp.ones(choice.experts.shape, bool)
    if spec.capacity_factor is not None:
        kept = _within_capacity(choice, extra, shape, spec, axes)
    reads = kept
    if "is_token" in extra:
        reads = kept & extra["is_token"].reshape(-1, 1)
    experts = jnp.where(reads, choice.experts, spec.num_experts)
    out = _summed(flat, experts, choice.weights, weights["experts"], spec, axes)
    routing = None
    if "counted" in extra:
        routing = _routing(choice, kept, extra, bins, axes)
    return out.astype(x.dtype).reshape(shape), routing


def _summed(x: Array, experts: Array, weights: Array, banks: Any, spec: Any, axes: _Axes) -> Array:
    """Sum each token's experts, over the devices that hold them or a part of their width."""
    activation = ExpertActivation(ACTIVATIONS[spec.activation], spec.limit, spec.alpha)

    def apply(x, experts, weights, banks):
        # Of the devices that each add a part of the width, the first adds the last bias.
        share = jnp.asarray(jax.lax.axis_index(axes.width) == 0, jnp.float32) if axes.width else 1.0
        return expert_mixture(x, experts, weights, banks, activation, share)

    per_device = banks["down_proj"].shape[0]
    if axes.expert is None:
        out = apply(x, experts, weights, banks)
    elif axes.exchanges:
        out = exchanged(
            x,
            experts,
            weights,
            banks,
            apply,
            axis=axes.expert,
            experts_per_device=per_device,
            lockstep=axes.manual,
        )
    else:
        own = experts - jax.lax.axis_index(axes.expert) * per_device
        own = jnp.where((own >= 0) & (own < per_device), own, per_device)
        out = jax.lax.psum(apply(x, own, weights, banks), axes.expert)
    return jax.lax.psum(out, axes.width) if axes.width else out


def _within_capacity(
    choice: Choice, extra: Mapping[str, Array], shape: tuple[int, ...], spec: Any, axes: _Axes
) -> Array:
    """Mark the slots within each expert's capacity: the first of each row, in the order of its tokens.

    A row's capacity follows from its tokens, not from its padding.
    """
    rows, length = shape[:2]
    real = jnp.sum(extra.get("is_token", jnp.ones(shape[:2], bool)), axis=1, dtype=jnp.int32)
    real = jax.lax.psum(real, axes.length) if axes.length else real
    even = -(-real * spec.router.top_k // spec.num_experts)
    capacity = jnp.maximum(1, jnp.floor(even * spec.capacity_factor)).astype(jnp.int32)
    slots = jax.nn.one_hot(choice.experts.reshape(rows, length, -1), spec.num_experts, dtype=jnp.int32)
    if "is_token" in extra:
        slots = slots * extra["is_token"][:, :, None, None]
    taken = jnp.sum(slots, axis=2)
    before = jnp.cumsum(taken, axis=1) - taken
    for axis in axes.length:
        totals = jax.lax.all_gather(jnp.sum(taken, axis=1), axis)
        earlier = jnp.arange(totals.shape[0]) < jax.lax.axis_index(axis)
        before = before + jnp.sum(totals * earlier[:, None, None], axis=0)[:, None]
    rank = jnp.take_along_axis(before, choice.experts.reshape(rows, length, -1), axis=-1)
    return (rank < capacity[:, None, None]).reshape(choice.experts.shape)


def _routing(choice: Choice, kept: Array, extra: Mapping[str, Array], bins: int, axes: _Axes) -> Routing:
    """Sum the statistics over every device that holds tokens."""
    counted = jax.lax.stop_gradient(extra["counted"].astype(jnp.float32))
    documents = extra.get("documents", jnp.zeros(counted.shape, jnp.int32))
    by_document, sums = routing_sums(choice, kept, counted, documents, bins)
    everywhere = (*axes.rows, *axes.length)
    total = lambda value, over: jax.lax.psum(value, over) if over else value  # noqa: E731
    by_document = total(by_document, axes.length)
    slots, shares = jax.lax.stop_gradient(by_document[..., 0, :]), by_document[..., 1, :]
    tokens = jax.lax.stop_gradient(jnp.sum(shares, axis=-1))
    num_experts, top_k = choice.logits.shape[-1], choice.experts.shape[-1]
    even = jnp.sum(slots * shares, axis=-1) * num_experts / (top_k * jnp.maximum(tokens, 1e-20))
    sums = {name: total(value, everywhere) for name, value in sums.items()}
    return Routing(**sums, balance=total(jnp.sum(even), axes.rows), bias_term=jnp.zeros(()))

"""Tokens through the experts chosen for them, on one device: sort by expert, multiply in groups, put back.

Entry points: `expert_mixture`, `ExpertActivation`. No token is padded or dropped: a slot whose expert is out of range
costs nothing and adds nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float, Int
from dew.kernels.grouped_matmul import grouped_matmul

Banks = Mapping[str, Array]
"""`gate_proj` and `up_proj` [E, D, F], `down_proj` [E, F, D] and, where experts have biases, the same names with
`_bias`: [E, F], [E, F] and [E, D]."""


CLAMPED_ALPHA = 1.702
"""Gain of the clamped form's sigmoid where nothing else is said."""


@dataclasses.dataclass(frozen=True)
class ExpertActivation:
    """What stands between an expert's projections: function(gate) * up, or the clamped form of gpt-oss.

    Attributes:
        function: Function of the gate.
        limit: Bound of both projections. With it the result is gate * sigmoid(alpha * gate) * (up + 1), after the gate
            is cut off above the limit and `up` on both sides; `function` is not used then.
        alpha: Gain of that sigmoid.
    """

    function: Callable[[Array], Array]
    limit: float | None = None
    alpha: float = CLAMPED_ALPHA

    def __call__(self, gate: Array, up: Array) -> Array:
        """Combine two projections of one shape."""
        if self.limit is None:
            return self.function(gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


def expert_mixture(
    x: Float[Array, "N D"],
    experts: Int[Array, "N K"],
    weights: Float[Array, "N K"],
    banks: Banks,
    activation: ExpertActivation,
    out_bias_share: Array | float = 1.0,
) -> Float[Array, "N D"]:
    """Sum the outputs of each token's experts by their weights.

    Args:
        x: Tokens.
        experts: Expert of each slot, counted from 0; a number past the last expert marks a slot without one.
        weights: Weight of each slot.
        banks: Weights of the experts.
        activation: What stands between the projections.
        out_bias_share: Part of the last bias that this device adds, where several add up parts of an expert.

    Returns:
        The sums, in float32.
    """
    num_experts, slots = banks["down_proj"].shape[0], experts.shape[1]
    order, inverse, sizes = _sorted_slots(experts, num_experts)
    group = experts.reshape(-1)[order]
    rows = _to_slots(x, order, inverse, slots)
    gate, up = (_projected(rows, banks, name, group, sizes) for name in ("gate_proj", "up_proj"))
    out = _projected(activation(gate, up), banks, "down_proj", group, sizes, out_bias_share)
    by_slot = _from_slots(out, order, inverse).reshape(*experts.shape, -1)
    return jnp.einsum("NKD,NK->ND", by_slot, weights.astype(jnp.float32), preferred_element_type=jnp.float32)


def _sorted_slots(experts: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """Order slots by expert: slot of each sorted row, row of each slot, rows of each expert."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype), axis=0, dtype=jnp.int32)
    return order, inverse, sizes


def _projected(
    rows: Array, banks: Banks, name: str, group: Array, sizes: Array, bias_share: Array | float = 1.0
) -> Array:
    product = grouped_matmul(rows, banks[name], sizes)
    if f"{name}_bias" not in banks:
        return product
    bias = banks[f"{name}_bias"].at[group].get(mode="fill", fill_value=0)
    return product + (bias * bias_share).astype(product.dtype)


# Both ways between tokens and sorted rows are gathers, backward too: left alone, their gradients would be scatters.
@jax.custom_vjp
def _from_slots(out: Array, order: Array, inverse: Array) -> Array:
    return out[inverse]


_from_slots.defvjp(
    lambda out, order, inverse: (out[inverse], order), lambda order, cotangent: (cotangent[order], None, None)
)


def _to_slots(x: Array, order: Array, inverse: Array, slots: int) -> Array:
    @jax.custom_vjp
    def spread(x: Array, order: Array, inverse: Array) -> Array:
        return x[order // slots]

    def forward(x, order, inverse):
        return x[order // slots], inverse

    def backward(inverse, cotangent):
        by_token = cotangent[inverse].reshape(-1, slots, cotangent.shape[-1])
        return jnp.sum(by_token, axis=1, dtype=jnp.float32).astype(cotangent.dtype), None, None

    spread.defvjp(forward, backward)
    return spread(x, order, inverse)

"""Which experts read a token, and with which weights: top-k routers as data, and what they say about their choices.

Entry points: `RouterSpec`, `RouterTraining`, `choose`, `Routing`, `router_loss`. Softmax routers follow the
Switch Transformer (https://arxiv.org/abs/2101.03961), groups and biases DeepSeek-V3
(https://arxiv.org/abs/2412.19437, section 2.1.2).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from dew.arrays import Array, Bool, Float, Int
from dew.tree import map_named

SCORES = ("softmax", "softmax_of_chosen", "sigmoid")
GROUP_SCORES = ("max", "top2")
BALANCE_BIAS = "balance_bias"
"""Name of the leaf of balance biases, which are stored and used in float32 whatever the dtype of a model: a step of
0.001 moves no bfloat16 number above 0.5."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How a router chooses.

    Attributes:
        top_k: Experts per token.
        score: "softmax" over all experts; "softmax_of_chosen" over those chosen, whose weights then sum to 1;
            "sigmoid" of each expert alone.
        normalise: Whether the weights of the chosen are divided by their sum.
        scale: Factor on the weights.
        groups: Equal groups of neighbouring experts.
        top_groups: Groups a token may choose from: the best of them.
        group_score: What makes a group good: the score of its best expert, or the sum of its best two.
        bias: Whether the router's projection adds a bias to its logits.
        balance_bias: Whether each expert has a bias that takes part in the choice but not in the weights.
    """

    top_k: int
    score: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    bias: bool = False
    balance_bias: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"a router chooses at least one expert. Received: top_k={self.top_k}")
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}. Received: score={self.score!r}")
        if self.group_score not in GROUP_SCORES:
            raise ValueError(
                f"group_score must be one of {', '.join(GROUP_SCORES)}. Received: group_score={self.group_score!r}"
            )
        if self.score == "softmax_of_chosen" and self.normalise:
            raise ValueError(
                "the weights of score='softmax_of_chosen' sum to 1 already; leave normalise=False. Received: "
                f"score={self.score!r}, normalise={self.normalise}"
            )
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"scale must be a finite number above 0; 1 changes nothing. Received: scale={self.scale}")
        if self.groups < 1:
            raise ValueError(f"groups must be 1, for none, or more. Received: groups={self.groups}")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"top_groups must lie in 1..groups; {self.groups} opens all groups. Received: "
                f"top_groups={self.top_groups}, groups={self.groups}"
            )

    def check(self, num_experts: int) -> None:
        """Refuse a number of experts that the router cannot choose from.

        Args:
            num_experts: Experts of the layer.

        Raises:
            ValueError: If the groups do not divide them, or fewer are open to a token than it needs.
        """
        if num_experts % self.groups:
            raise ValueError(
                f"{self.groups} groups do not divide {num_experts} experts. Use groups={_divisors(num_experts)}. "
                f"Received: groups={self.groups}, num_experts={num_experts}"
            )
        size = num_experts // self.groups
        if self.top_k > self.top_groups * size:
            more = f", or top_groups={fewest} or more" if (fewest := -(-self.top_k // size)) <= self.groups else ""
            raise ValueError(
                f"top_k={self.top_k} exceeds the {self.top_groups * size} experts of {self.top_groups} of "
                f"{self.groups} groups of {size}. Use top_k={self.top_groups * size} or less{more}. Received: "
                f"top_k={self.top_k}, top_groups={self.top_groups}, groups={self.groups}, num_experts={num_experts}"
            )
        if self.group_score == "top2" and self.groups > 1 and size < 2:
            raise ValueError(
                f"group_score='top2' needs groups of two or more experts; {self.groups} groups have {size}. Use "
                f"groups={_divisors(num_experts, smallest_group=2)}, or group_score='max'. Received: "
                f"groups={self.groups}, num_experts={num_experts}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterTraining:
    """What trains routers beside the loss of the tokens.

    Attributes:
        balance_loss: Weight of the balance loss, the mean over layers with experts; 1 where all is even.
        z_loss: Weight of the squared logarithm of the softmax's denominator (https://arxiv.org/abs/2202.08906, section
            2), the mean over layers.
        bias_rate: What an update adds to the balance bias of an expert with less than its share of the update's
            tokens, and takes from one with more (https://arxiv.org/abs/2408.15664); 0 leaves the biases as they are.
    """

    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number of 0 or more. Received: {name}={value!r}")

    def check(self, routers: Sequence[RouterSpec]) -> None:
        """Refuse what the routers of a model leave without effect.

        Args:
            routers: Those of the layers with experts.

        Raises:
            ValueError: If something is to be trained that the model does not have.
        """
        asked = [f"{name}={value}" for name, value in dataclasses.asdict(self).items() if value]
        if asked and not routers:
            raise ValueError(
                "router_training is about routers, and no layer of this model has experts. Leave it out, or give a "
                f"layer an ExpertsSpec. Received: {', '.join(asked)}"
            )
        if self.bias_rate and not any(router.balance_bias for router in routers):
            raise ValueError(
                "bias_rate moves balance biases, and no router of this model has any. Use "
                f"RouterSpec(balance_bias=True), or bias_rate=0. Received: bias_rate={self.bias_rate}"
            )


def _divisors(num_experts: int, smallest_group: int = 1) -> str:
    """List the numbers of equal groups."""
    counts = (count for count in range(1, num_experts + 1) if num_experts % count == 0)
    return " or ".join(str(count) for count in counts if count == 1 or num_experts // count >= smallest_group)


def is_balance_bias(path: str) -> bool:
    """Say whether a leaf holds balance biases.

    Args:
        path: Its path, or the last part of it.
    """
    return path.rsplit("/", 1)[-1] == BALANCE_BIAS


@jax.custom_vjp
def excess_load(balance_bias: Float[Array, "E"], load: Float[Array, "E"]) -> Float[Array, ""]:
    """Give zero, with the excess load of each expert as its gradient by the balance bias.

    It is `E * load - sum(load)`: where tokens weigh 1 these are whole numbers, exact below 2^24, so that sums over
    microbatches and the batches of a window are 0 where the load is even. Of what the zero is multiplied by only the
    sign counts, as in `scaled_gradients`.

    Args:
        balance_bias: The biases.
        load: Slots given to each expert.
    """
    return 0.0 * jnp.sum(load)  # a constant would not be mapped over stages, and idle ones would count with the others


excess_load.defvjp(
    lambda balance_bias, load: (excess_load(balance_bias, load), load.shape[-1] * load - jnp.sum(load)),
    lambda excess, cotangent: (excess * jnp.sign(cotangent), None),
)


def scaled_gradients(gradients: Any, factor: Float[Array, ""]) -> Any:
    """Multiply gradients, those of balance biases by the sign of the factor alone: products would round the counts.

    Args:
        gradients: Tree of gradients.
        factor: What the loss was multiplied by, or is divided by.
    """

    def scaled(path: str, gradient: Array) -> Array:
        return gradient * (jnp.sign(factor) if is_balance_bias(path) else factor).astype(gradient.dtype)

    return map_named(scaled, gradients)


@struct.dataclass
class Choice:
    """What a router says of each token.

    Attributes:
        experts: Chosen experts, best first, int32 [N, top_k].
        weights: Their weights, float32 [N, top_k].
        logits: The projection's output, float32 [N, E].
        shares: Scores of all experts as shares that sum to 1, float32 [N, E].
    """

    experts: Array
    weights: Array
    logits: Array
    shares: Array


def choose(logits: Float[Array, "N E"], balance_bias: Float[Array, "E"] | None, spec: RouterSpec) -> Choice:
    """Choose experts for each token, in float32.

    Args:
        logits: The router's projection of each token, its bias included.
        balance_bias: Added to the scores for the choice alone; None where the router has none.
        spec: The rule.
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if spec.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    # Choosing among logits keeps an order that a softmax far from its maximum would round away.
    ranked = logits if spec.score == "softmax_of_chosen" else scores
    if balance_bias is not None:
        ranked = ranked + jax.lax.stop_gradient(balance_bias.astype(jnp.float32))
    if spec.groups > 1:
        ranked = jnp.where(_open(ranked, spec), ranked, -jnp.inf)
    experts = jax.lax.top_k(jax.lax.stop_gradient(ranked), spec.top_k)[1]
    if spec.score == "softmax_of_chosen":
        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
    else:
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if spec.normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)  # a sum of sigmoids may be 0
    shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20) if spec.score == "sigmoid" else scores
    return Choice(experts.astype(jnp.int32), weights * spec.scale, logits, shares)


def _open(ranked: Float[Array, "N E"], spec: RouterSpec) -> Bool[Array, "N E"]:
    """Mark the experts of each token's best groups."""
    grouped = ranked.reshape(ranked.shape[0], spec.groups, -1)
    if spec.group_score == "max":
        group_scores = jnp.max(grouped, axis=-1)
    else:
        group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    best = jax.lax.top_k(group_scores, spec.top_groups)[1]
    is_open = jnp.any(jax.nn.one_hot(best, spec.groups, dtype=bool), axis=1)
    return jnp.repeat(is_open, grouped.shape[-1], axis=-1)


class Routing(struct.PyTreeNode):
    """Sums over the counted tokens of one layer; every token adds its weight.

    Attributes:
        load: Slots given to each expert, [E]; slots of dropped tokens included.
        balance: Sum of the balance loss of each token's document, 1 a token where all is even.
        z: Sum of the squared logarithm of the softmax's denominator.
        entropy: Sum of the entropy of the shares over its greatest value, in 0..1.
        dropped: Slots that a capacity left out.
        tokens: Sum of the weights.
        bias_term: Zero, with the gradient of `excess_load` by the router's balance bias.
    """

    load: Any
    balance: Any
    z: Any
    entropy: Any
    dropped: Any
    tokens: Any
    bias_term: Any


def routing_sums(
    choice: Choice,
    kept: Bool[Array, "N K"],
    weights: Float[Array, "B T"],
    documents: Int[Array, "B T"],
    num_documents: int,
) -> tuple[Array, dict[str, Array]]:
    """Sum what one layer's choices say over the tokens at hand, those of rows that may lie on several devices apart.

    Args:
        choice: What the router said of each token.
        kept: Which slots are computed.
        weights: Weight of each token, rows and positions.
        documents: Document of each token, counted from 0 in its row.
        num_documents: Most documents of a row.

    Returns:
        Per row and document the pair of slot counts and shares of each expert, [B, documents, 2, E], and the weighted
        sums of the other statistics.
    """
    rows, length = weights.shape
    num_experts = choice.logits.shape[-1]
    flat = weights.reshape(-1)
    slots = jnp.sum(jax.nn.one_hot(choice.experts, num_experts, dtype=jnp.float32), axis=1)
    pairs = jnp.stack([slots, choice.shares], axis=1) * flat[:, None, None]
    pairs = pairs.reshape(rows, length, 2, num_experts)
    if num_documents == 1:
        by_document = jnp.sum(pairs, axis=1, keepdims=True)
    else:
        add = functools.partial(jax.ops.segment_sum, num_segments=num_documents)
        by_document = jax.vmap(add)(pairs, documents)
    logs = jnp.log(jnp.maximum(choice.shares, jnp.finfo(jnp.float32).tiny))
    entropy = -jnp.sum(choice.shares * logs, axis=-1) / jnp.log(float(max(num_experts, 2)))
    return by_document, {
        "load": jnp.sum(pairs[:, :, 0], axis=(0, 1)),
        "z": jnp.sum(jax.nn.logsumexp(choice.logits, axis=-1) ** 2 * flat),
        "entropy": jnp.sum(entropy * flat),
        "dropped": jnp.sum((~kept) * flat[:, None]),
        "tokens": jnp.sum(flat),
    }


def router_loss(routing: Sequence[Routing], training: RouterTraining) -> Float[Array, ""]:
    """Sum what the routers of all layers add to the total of the loss.

    Args:
        routing: Statistics of each layer with experts.
        training: Weights of the losses.

    Returns:
        A float32 scalar. It has no value of its own for balance biases: only their gradient, the excess load.
    """
    weighted = sum(training.balance_loss * each.balance + training.z_loss * each.z for each in routing)
    total = jnp.asarray(weighted / len(routing), jnp.float32)
    return total + sum(each.bias_term for each in routing) if training.bias_rate else total

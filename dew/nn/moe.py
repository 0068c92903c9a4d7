"""A layer of experts in place of a block's perceptron: route each token, compute its experts, wherever they are stored.

Entry points: `ExpertsSpec`, `Experts`. Every token is computed by all of its experts, as in MegaBlocks
(https://arxiv.org/abs/2211.15841); a capacity (https://arxiv.org/abs/2101.03961, section 2.2) is a choice, and counted.
"""

import dataclasses
from typing import Any

import jax
from flax import linen as nn

from dew.arrays import Array, Bool, Float, Int
from dew.kernels.expert_mixture import CLAMPED_ALPHA
from dew.nn.expert_dispatch import BANK_NAMES, routed
from dew.nn.linear import INITIAL_SCALE, Linear
from dew.nn.mlp import Activation, Mlp, MlpSpec, check_activation
from dew.nn.router import BALANCE_BIAS, RouterSpec, Routing
from dew.nn.sharding import declare

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Shape of a layer of experts.

    Attributes:
        num_experts: How many there are.
        features: Hidden width of each.
        router: How a token's experts are chosen.
        activation: Function of the gate.
        limit: Bound of the projections; with it the activation is gpt-oss' clamped form, see `ExpertActivation`.
        alpha: Gain of the sigmoid in that form.
        bias: Whether the experts' projections add biases.
        shared: A perceptron that reads every token beside the experts; None for none.
        shared_gate: Whether the sigmoid of a projection scales what the shared perceptron adds.
        capacity_factor: Slots of an expert in each row over an even share of those of its tokens; later tokens are
            dropped, and counted. None drops nothing; neither does a call with a cache, where a token would find other
            tokens before it than in the whole row.
    """

    num_experts: int
    features: int
    router: RouterSpec
    activation: Activation = "silu"
    limit: float | None = None
    alpha: float = CLAMPED_ALPHA
    bias: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.features < 1:
            raise ValueError(
                "experts need a positive number and hidden width. Received: "
                f"num_experts={self.num_experts}, features={self.features}"
            )
        check_activation(self.activation)
        if self.limit is not None and (self.limit <= 0 or self.activation != "silu"):
            raise ValueError(
                "limit must be positive and replaces the activation, which is left at 'silu'. Received: "
                f"limit={self.limit}, activation={self.activation!r}"
            )
        if self.alpha <= 0 or (self.limit is None and self.alpha != CLAMPED_ALPHA):
            raise ValueError(
                "alpha must be positive and belongs to the clamped form, which a limit asks for. Received: "
                f"alpha={self.alpha}, limit={self.limit}"
            )
        if self.shared_gate and self.shared is None:
            raise ValueError(
                "shared_gate=True needs a shared perceptron. Use shared=MlpSpec(features=...), or shared_gate=False. "
                f"Received: shared_gate={self.shared_gate}, shared={self.shared}"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < float("inf"):
            raise ValueError(
                "capacity_factor must be positive and finite, or None to drop nothing. Received: "
                f"capacity_factor={self.capacity_factor}"
            )
        self.router.check(self.num_experts)


class _Router(nn.Module):
    """The projection that scores experts.

    Attributes:
        features: Width of the residual stream.
        spec: The experts.
        param_dtype: Storage dtype, but of balance biases.
    """

    features: int
    spec: ExpertsSpec
    param_dtype: Any = "float32"

    def setup(self) -> None:
        """Declare the weights."""
        experts, router = (self.spec.num_experts,), self.spec.router
        normal, zeros = nn.initializers.normal(INITIAL_SCALE), nn.initializers.zeros
        shape = (self.features, *experts)
        weights = {"kernel": declare(self, "kernel", shape, ("embed", "router"), normal, self.param_dtype)}
        if router.bias:
            weights["bias"] = declare(self, "bias", experts, ("router",), zeros, self.param_dtype)
        if router.balance_bias:
            weights[BALANCE_BIAS] = declare(self, BALANCE_BIAS, experts, ("router",), zeros, "float32")
        self.weights = weights


class _Banks(nn.Module):
    """The weights of all experts, one bank per projection.

    Attributes:
        features: Width of the residual stream.
        spec: The experts.
        param_dtype: Storage dtype.
    """

    features: int
    spec: ExpertsSpec
    param_dtype: Any = "float32"

    def setup(self) -> None:
        """Declare the weights."""
        count, dtype = self.spec.num_experts, self.param_dtype
        normal, zeros = nn.initializers.normal(INITIAL_SCALE), nn.initializers.zeros
        weights = {}
        for name in PROJECTIONS:
            sizes = (self.features, self.spec.features)[:: -1 if name == "down_proj" else 1]
            weights[name] = declare(self, name, (count, *sizes), BANK_NAMES[name], normal, dtype)
            if self.spec.bias:
                key = f"{name}_bias"
                weights[key] = declare(self, key, (count, sizes[1]), BANK_NAMES[key], zeros, dtype)
        self.weights = weights


class Experts(nn.Module):
    """The sum of a token's experts by their weights, and of the shared perceptron.

    Attributes:
        features: Width of the residual stream.
        spec: The experts.
        param_dtype: Storage dtype of the weights.
    """

    features: int
    spec: ExpertsSpec
    param_dtype: Any = "float32"

    def setup(self) -> None:
        """Declare router, banks and the shared perceptron."""
        spec, dtype = self.spec, self.param_dtype
        self.router = _Router(self.features, spec, dtype)
        self.experts = _Banks(self.features, spec, dtype)
        if spec.shared is not None:
            self.shared = Mlp(self.features, spec.shared, dtype)
        if spec.shared_gate:
            self.shared_gate = Linear((self.features,), (1,), ("embed",), (None,), False, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        is_token: Bool[Array, "B T"] | None = None,
        counted: Float[Array, "B T"] | None = None,
        documents: Int[Array, "B T"] | None = None,
        is_cached: bool = False,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Apply the layer.

        Args:
            x: Input of the block's second half.
            is_token: False for padding, which no expert reads; None means no padding.
            counted: Weight of each token in the statistics; None means that none are wanted.
            documents: Document of each token, counted from 0 in its row; None means one document a row.
            is_cached: Whether the tokens follow those of a cache; none is dropped then.

        Returns:
            The output, and the sums over counted tokens.
        """
        weights = {"router": dict(self.router.weights), "experts": dict(self.experts.weights)}
        spec = dataclasses.replace(self.spec, capacity_factor=None) if is_cached else self.spec
        out, routing = routed(x, weights, spec, is_token, counted, documents)
        if self.spec.shared is not None:
            shared = self.shared(x)
            if self.spec.shared_gate:
                shared = jax.nn.sigmoid(self.shared_gate(x)) * shared
            out = out + shared
        return out, routing

"""The multi-layer perceptron of a decoder block, gated or plain.

Entry points: `MlpSpec`, `Mlp` (https://arxiv.org/abs/2002.05202).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import linen as nn

from dew.arrays import Array, Float
from dew.nn.linear import Linear
from dew.nn.sharding import constrain

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu_squared"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jax.nn.relu(x) ** 2,
}


def check_activation(activation: str) -> None:
    """Refuse a name that is not in `ACTIVATIONS`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}. Received: activation={activation!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Shape of the perceptron.

    Attributes:
        features: Hidden width.
        activation: Function of the gate; without a gate, of the hidden values.
        bias: Whether the projections add a bias.
        gated: Whether a gate multiplies the hidden values.
    """

    features: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        if self.features < 1:
            raise ValueError(f"an mlp needs a positive hidden width. Received: features={self.features}")
        check_activation(self.activation)


class Mlp(nn.Module):
    """down(activation(gate(x)) * up(x)); without a gate, down(activation(up(x))).

    Attributes:
        features: Width of the residual stream.
        spec: Hidden width, activation, biases.
        param_dtype: Storage dtype of the weights.
    """

    features: int
    spec: MlpSpec
    param_dtype: Any = "float32"

    def setup(self) -> None:
        """Declare the projections."""
        wide = (self.spec.features,)
        narrow = (self.features,)
        bias, dtype = self.spec.bias, self.param_dtype
        if self.spec.gated:
            self.gate_proj = Linear(narrow, wide, ("embed",), ("mlp",), bias, dtype)
        self.up_proj = Linear(narrow, wide, ("embed",), ("mlp",), bias, dtype)
        self.down_proj = Linear(wide, narrow, ("mlp",), ("embed",), bias, dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply the perceptron to each token."""
        names = ("activation_batch", "activation_length", "activation_mlp")
        inputs = [constrain(self.gate_proj(x), names)] if self.spec.gated else []
        inputs.append(constrain(self.up_proj(x), names))
        activation = ACTIVATIONS[self.spec.activation]
        _ = self.down_proj.kernel  # bound here: inside the checkpoint Flax could not bind it

        # Between the projections only gate and up are kept for the backward pass: the rest is elementwise and cheaper
        # to compute again than to write and read, and the product itself is not repeated.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def finish(*inputs: Array) -> Array:
            return self.down_proj(activation(inputs[0]) * inputs[1] if len(inputs) > 1 else activation(inputs[0]))

        return finish(*inputs)

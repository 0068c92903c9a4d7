"""A linear map between groups of named dimensions.

Entry point: `Linear`. Heads keep a dimension of their own, so that a mesh splits whole heads.
"""

from typing import Any

from flax import linen as nn

from dew.arrays import Array, Float
from dew.kernels.quantized_product import product
from dew.nn.sharding import declare

INITIAL_SCALE = 0.02
"""Standard deviation of initial weights, the reference checkpoints' `initializer_range`."""


class Linear(nn.Module):
    """Multiply the trailing dimensions of the input by a kernel of shape `inputs + outputs`.

    Attributes:
        inputs: Sizes of the input's trailing dimensions, contracted.
        outputs: Sizes of the output's trailing dimensions.
        input_names: Logical names of `inputs`.
        output_names: Logical names of `outputs`.
        use_bias: Whether to add a bias of shape `outputs`.
        param_dtype: Storage dtype of the weights.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_names: tuple[str | None, ...]
    output_names: tuple[str | None, ...]
    use_bias: bool = False
    param_dtype: Any = "float32"

    def setup(self) -> None:
        """Declare the kernel and the bias."""
        names = self.input_names + self.output_names
        self.kernel = declare(
            self, "kernel", self.inputs + self.outputs, names, nn.initializers.normal(INITIAL_SCALE), self.param_dtype
        )
        self.bias = (
            declare(self, "bias", self.outputs, self.output_names, nn.initializers.zeros, self.param_dtype)
            if self.use_bias
            else None
        )

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Map `x`, in its dtype."""
        y = product(x, self.kernel, len(self.inputs))
        return y if self.bias is None else y + self.bias.astype(x.dtype)

"""One decoder block: attention and perceptron on a residual stream, with the place of its norms as data.

Entry points: `LayerSpec`, `DecoderLayer`.
"""

import dataclasses
from typing import Any, Literal

from flax import linen as nn

from dew.arrays import Array, Float
from dew.kernels.attention import Implementation, Visibility
from dew.nn.attention import AttentionSpec, SelfAttention
from dew.nn.cache import LayerCache
from dew.nn.embed import scaled
from dew.nn.mlp import Mlp, MlpSpec
from dew.nn.norm import Norm, NormSpec
from dew.nn.rope import Tables
from dew.nn.sharding import constrain

RESIDUAL_NAMES = ("activation_batch", "activation_length", "activation_embed")

Placement = Literal["pre", "post", "both", "parallel", "parallel_one_norm"]

# Norm around attention and around the perceptron: (before, after) of each. The names are those most checkpoints use.
_NORMS: dict[str, tuple[tuple[str | None, str | None], tuple[str | None, str | None]]] = {
    "pre": (("input_layernorm", None), ("post_attention_layernorm", None)),
    "post": ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
    "both": (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "parallel": (("input_layernorm", None), ("post_attention_layernorm", None)),
    "parallel_one_norm": (("input_layernorm", None), ("input_layernorm", None)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder block.

    Attributes:
        attention: Its attention.
        mlp: Its perceptron.
        norm: Its norms.
        placement: Where they are. "pre": before attention and before the perceptron (Llama). "post": after each,
            none before (OLMo 2). "both": before and after each (Gemma 2). "parallel": before each, and both read the
            block's input (GPT-NeoX). "parallel_one_norm": so, with one norm for both (Cohere).
        residual_scale: Factor on what each adds to the residual stream (Granite).
    """

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    placement: Placement = "pre"
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.placement not in _NORMS:
            raise ValueError(f"placement must be one of {', '.join(_NORMS)}. Received: placement={self.placement!r}")


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the norms where the spec places them.

    Attributes:
        features: Width of the residual stream.
        spec: The block.
        param_dtype: Storage dtype of the weights.
        implementation: Attention kernel.
    """

    features: int
    spec: LayerSpec
    param_dtype: Any = "float32"
    implementation: Implementation = "auto"

    def setup(self) -> None:
        """Declare the block's weights."""
        spec, dtype = self.spec, self.param_dtype
        self.self_attn = SelfAttention(self.features, spec.attention, dtype, self.implementation)
        self.mlp = Mlp(self.features, spec.mlp, dtype)
        for name in {name for around in _NORMS[spec.placement] for name in around if name}:
            setattr(self, name, Norm(self.features, spec.norm, dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        visibility: Visibility,
        rotary: Tables | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Apply the block; arguments as `SelfAttention`'s."""
        (before_mixing, after_mixing), (before_mlp, after_mlp) = _NORMS[self.spec.placement]
        normal = self._normal(before_mixing, x)
        mixed, cache = self.self_attn(normal, visibility, rotary, cache)
        summed = self._added(x, self._normal(after_mixing, mixed))
        if self.spec.placement.startswith("parallel"):
            source = normal if before_mlp == before_mixing else self._normal(before_mlp, x)
        else:
            source = self._normal(before_mlp, summed)
        return self._added(summed, self._normal(after_mlp, self.mlp(source))), cache

    def _normal(self, name: str | None, x: Array) -> Array:
        return x if name is None else getattr(self, name)(x)

    def _added(self, x: Array, change: Array) -> Array:
        return constrain(x + scaled(change, self.spec.residual_scale), RESIDUAL_NAMES)

"""A layer that predicts one token further than the layer before it: two norms, a projection, a block, a norm.

Entry points: `PredictionSpec`, `PredictionLayer` (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from dew.arrays import Array, Float
from dew.kernels.attention import Implementation
from dew.nn.block import RESIDUAL_NAMES, DecoderLayer, LayerSpec, Surroundings
from dew.nn.linear import Linear
from dew.nn.norm import Norm, NormSpec
from dew.nn.rope import Tables
from dew.nn.router import Routing
from dew.nn.sharding import constrain
from dew.parallel.choice import SequenceImplementation

NORMS = ("embedding_norm", "hidden_norm", "norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionSpec:
    """Layers that predict tokens after the next one: layer k, counted from 1, the token k after it.

    Attributes:
        layer: Their block.
        depth: How many there are.
        is_shared: Whether they share norms and projection, and each reads what the last norm made of the layer before
            it (Qwen3-Next). Otherwise each has its own, and reads what the block before it gave (DeepSeek-V3).
    """

    layer: LayerSpec
    depth: int = 1
    is_shared: bool = False

    def __post_init__(self) -> None:
        if type(self.depth) is not int or self.depth < 1:
            raise ValueError(f"depth must be a positive whole number; None predicts nothing. Received: {self.depth!r}")


class PredictionLayer(nn.Module):
    """norm(block(proj([norm(embedding of a further token); norm(hidden state)]))).

    Attributes:
        features: Width of the residual stream.
        layer: The block.
        norm_spec: The norms.
        has_ends: Whether norms and projection are stored here; otherwise the block alone.
        param_dtype: Storage dtype of the weights.
        implementation: Attention kernel.
        sequence_impl: Exchange of attention on a mesh that splits positions.
    """

    features: int
    layer: LayerSpec
    norm_spec: NormSpec
    has_ends: bool = True
    param_dtype: Any = "float32"
    implementation: Implementation = "auto"
    sequence_impl: SequenceImplementation = "auto"

    def setup(self) -> None:
        """Declare the weights."""
        kinds = self.implementation, self.sequence_impl
        self.block = DecoderLayer(self.features, self.layer, self.param_dtype, *kinds)
        if self.has_ends:
            for name in NORMS:
                setattr(self, name, Norm(self.features, self.norm_spec, self.param_dtype))
            sizes, names = (2, self.features), (None, "embed")
            self.proj = Linear(sizes, (self.features,), names, ("mlp",), False, self.param_dtype)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        around: Surroundings,
        rotary: Tables | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Routing | None]:
        """Apply the layer.

        Args:
            hidden: What the layer before it left at each position, or the output of the model's last norm.
            embedded: Embedding of the newest token that each position may read.
            around: As a block's.
            rotary: As a block's.

        Returns:
            What the block gives, the last norm of it for the head, and what routers say of counted tokens.
        """
        if not self.has_ends:
            x, _, routing = self.block(hidden, around, rotary)
            return x, x, routing
        dtype = embedded.dtype
        # The loss splits positions over tensor too. Without pins GSPMD carries that split back into the projection.
        hidden = constrain(hidden.astype(dtype), RESIDUAL_NAMES)
        read = jnp.stack([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-2)
        x = self.proj(constrain(read, (*RESIDUAL_NAMES[:2], None, RESIDUAL_NAMES[2])))
        x = constrain(x, RESIDUAL_NAMES)
        x = x.astype(jnp.float32) if self.layer.residual_in_float32 else x
        x, _, routing = self.block(x, around, rotary)
        return x, self.norm(x).astype(dtype), routing

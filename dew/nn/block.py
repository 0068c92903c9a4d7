"""One decoder block: a mixer of tokens and a perceptron on a residual stream, with the place of its norms as data.

Entry points: `LayerSpec`, `DecoderLayer`, `Surroundings`.
"""

import dataclasses
from typing import Any, Literal

from flax import linen as nn
from flax import struct

from dew.arrays import Array, Bool, Float, Int
from dew.kernels.attention import Implementation, Visibility
from dew.kernels.dropout import MIXER, MLP, Dropout
from dew.nn.attention import AttentionSpec, SelfAttention
from dew.nn.cache import LayerCache, LayerLatents, LayerState
from dew.nn.embed import scaled
from dew.nn.gated_delta_net import GatedDeltaNet, GatedDeltaNetSpec
from dew.nn.latent_attention import LatentAttention, LatentAttentionSpec
from dew.nn.mamba2 import Mamba2, Mamba2Spec
from dew.nn.mlp import Mlp, MlpSpec
from dew.nn.moe import Experts, ExpertsSpec
from dew.nn.norm import Norm, NormSpec
from dew.nn.rope import Tables
from dew.nn.router import Routing
from dew.nn.sharding import constrain
from dew.parallel.choice import SequenceImplementation

RESIDUAL_NAMES = ("activation_batch", "activation_length", "activation_embed")

Placement = Literal["pre", "post", "both", "parallel", "parallel_one_norm"]

# Norm around the mixer and around the perceptron: (before, after) of each. The names are those most checkpoints use.
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
        mixer: What moves information between tokens; the type of its spec decides the layer.
        mlp: Its perceptron, or its experts; None for a block that is a mixer alone.
        norm: Its norms.
        placement: Where they are. "pre": before the mixer and before the perceptron (Llama). "post": after each,
            none before (OLMo 2). "both": before and after each (Gemma 2). "parallel": before each, and both read the
            block's input (GPT-NeoX). "parallel_one_norm": so, with one norm for both (Cohere).
        residual_scale: Factor on what each adds to the residual stream (Granite).
        residual_in_float32: Whether the residual stream is float32 whatever the compute dtype is (Mamba).
    """

    mixer: AttentionSpec | LatentAttentionSpec | Mamba2Spec | GatedDeltaNetSpec
    mlp: MlpSpec | ExpertsSpec | None
    norm: NormSpec
    placement: Placement = "pre"
    residual_scale: float = 1.0
    residual_in_float32: bool = False

    def __post_init__(self) -> None:
        if self.placement not in _NORMS:
            raise ValueError(f"placement must be one of {', '.join(_NORMS)}. Received: placement={self.placement!r}")
        if self.mlp is None and self.placement.startswith("parallel"):
            raise ValueError(f"a block without an mlp has nothing in parallel. Received: placement={self.placement!r}")

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a block that attends.

        Raises:
            ValueError: If the block has another mixer: none that attends, or one that attends by latents.
        """
        if not isinstance(self.mixer, AttentionSpec):
            raise ValueError(f"the block has no AttentionSpec. Received: mixer={self.mixer!r}")
        return self.mixer

    @property
    def experts(self) -> ExpertsSpec:
        """The experts of a block that has them.

        Raises:
            ValueError: If the block has none.
        """
        if not isinstance(self.mlp, ExpertsSpec):
            raise ValueError(f"the block has no experts. Received: mlp={self.mlp!r}")
        return self.mlp

    @property
    def norm_names(self) -> frozenset[str]:
        """Names of the norms that the block has."""
        around = _NORMS[self.placement][: 1 if self.mlp is None else 2]
        return frozenset(name for pair in around for name in pair if name)


class Surroundings(struct.PyTreeNode):
    """What a block is told about its tokens beside their values.

    Attributes:
        visibility: Which keys each query reads, for mixers that attend.
        starts: Tokens that begin a document, for mixers with a state; None means one document a row. Not for caches.
        real: Tokens that are not padding, for mixers with a state and a cache; None means all. Padding is on the left.
        is_token: Tokens that are not padding, for experts; None means all.
        counted: Weight of each token in the routing statistics; None where they are not wanted.
        documents: Document of each token, counted from 0 in its row, for these statistics; None means one a row.
        dropout: What training drops; None where nothing is.
    """

    visibility: Visibility
    starts: Bool[Array, "B T"] | None = None
    real: Bool[Array, "B T"] | None = None
    is_token: Bool[Array, "B T"] | None = None
    counted: Float[Array, "B T"] | None = None
    documents: Int[Array, "B T"] | None = None
    dropout: Dropout | None = None


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), with the norms where the spec places them.

    Attributes:
        features: Width of the residual stream.
        spec: The block.
        param_dtype: Storage dtype of the weights.
        implementation: Attention kernel.
        sequence_impl: Exchange of attention on a mesh that splits positions.
    """

    features: int
    spec: LayerSpec
    param_dtype: Any = "float32"
    implementation: Implementation = "auto"
    sequence_impl: SequenceImplementation = "auto"

    def setup(self) -> None:
        """Declare the block's weights."""
        spec, dtype = self.spec, self.param_dtype
        if isinstance(spec.mixer, Mamba2Spec):
            self.mamba = Mamba2(self.features, spec.mixer, dtype)
        elif isinstance(spec.mixer, GatedDeltaNetSpec):
            self.linear_attn = GatedDeltaNet(self.features, spec.mixer, dtype)
        else:
            attention: Any = LatentAttention if isinstance(spec.mixer, LatentAttentionSpec) else SelfAttention
            self.self_attn = attention(self.features, spec.mixer, dtype, self.implementation, self.sequence_impl)
        if isinstance(spec.mlp, ExpertsSpec):
            self.mlp: Any = Experts(self.features, spec.mlp, dtype)
        elif spec.mlp is not None:
            self.mlp = Mlp(self.features, spec.mlp, dtype)
        for name in sorted(spec.norm_names):
            setattr(self, name, Norm(self.features, spec.norm, dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        around: Surroundings,
        rotary: Tables | None = None,
        cache: LayerCache | LayerLatents | LayerState | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | LayerLatents | LayerState | None, Routing | None]:
        """Apply the block.

        Args:
            x: Residual stream.
            around: What else its mixer must know of the tokens.
            rotary: Tables of the tokens' positions; None where the mixer has no rotary.
            cache: The layer's window on the cache; None for whole sequences.

        Returns:
            The residual stream, the window after the new tokens, and what routers say of counted tokens.
        """
        (before_mixing, after_mixing), (before_mlp, after_mlp) = _NORMS[self.spec.placement]
        normal = self._normal(before_mixing, x)
        mixed, cache = self._mixed(normal, around, rotary, cache)
        summed = self._added(x, self._normal(after_mixing, mixed), around.dropout, MIXER)
        if self.spec.mlp is None:
            return summed, cache, None
        if self.spec.placement.startswith("parallel"):
            source = normal if before_mlp == before_mixing else self._normal(before_mlp, x)
        else:
            source = self._normal(before_mlp, summed)
        changed, routing = self._transformed(source, around, is_cached=cache is not None)
        return self._added(summed, self._normal(after_mlp, changed), around.dropout, MLP), cache, routing

    def _transformed(self, source: Array, around: Surroundings, *, is_cached: bool) -> tuple[Array, Routing | None]:
        """Apply the perceptron, or the experts."""
        if isinstance(self.spec.mlp, ExpertsSpec):
            return self.mlp(source, around.is_token, around.counted, around.documents, is_cached)
        return self.mlp(source), None

    def _mixed(self, normal: Array, around: Surroundings, rotary: Tables | None, cache: Any) -> tuple[Array, Any]:
        """Mix tokens by what the spec says; the window is of the mixer's own kind."""
        if isinstance(self.spec.mixer, Mamba2Spec):
            return self.mamba(normal, around.starts, around.real, cache)
        if isinstance(self.spec.mixer, GatedDeltaNetSpec):
            return self.linear_attn(normal, around.starts, around.real, cache)
        dropout = None if around.dropout is None else around.dropout.of_attention(self.spec.mixer.num_heads)
        return self.self_attn(normal, around.visibility, rotary, cache, dropout)

    def _normal(self, name: str | None, x: Array) -> Array:
        if name is None:
            return x
        norm = getattr(self, name)
        return norm(x.astype(norm.scale.dtype) if self.spec.residual_in_float32 else x)

    def _added(self, x: Array, change: Array, dropout: Dropout | None, site: int) -> Array:
        if dropout is not None:
            change = dropout.of_residual(change, site)
        return constrain(x + scaled(change, self.spec.residual_scale), RESIDUAL_NAMES)

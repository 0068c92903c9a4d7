"""Self-attention of a decoder block: grouped heads, rotary positions, optional norms on queries and keys.

Entry points: `AttentionSpec`, `SelfAttention` (grouped queries: https://arxiv.org/abs/2305.13245).
"""

import dataclasses
import math
from typing import Any, Literal

import jax
from flax import linen as nn

from dew.arrays import Array, Float
from dew.kernels.attention import Implementation, Visibility
from dew.kernels.dropout import AttentionDropout
from dew.nn.cache import KeyValueShape, LayerCache
from dew.nn.linear import Linear
from dew.nn.masks import limited
from dew.nn.norm import Norm, NormSpec
from dew.nn.rope import RotarySpec, Tables, rotate
from dew.nn.sharding import constrain, declare
from dew.parallel.attention_kernel import sharded_attention
from dew.parallel.choice import SequenceImplementation
from dew.parallel.exchange import KEY_NAMES, QUERY_NAMES, sequence_attention, splits_positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Shape of the attention.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key/value heads, a divisor of `num_heads`.
        head_dim: Width of a head.
        bias: Whether the q, k and v projections add a bias.
        out_bias: Whether the output projection adds a bias.
        qk_norm: Norm of queries and keys before rotation; None means none.
        qk_norm_over: What it normalises together: each head, or all heads of a token (OLMo 2).
        scale: Factor on the logits; None means head_dim ** -0.5.
        softcap: Bound of the logits; None leaves them.
        window: How many tokens a token reads, itself included; None means all before it.
        chunk: Length of the blocks of a document that a token reads its own of (Llama 4); None means all.
        sinks: Whether each head has a learned logit that joins the softmax without a value (gpt-oss).
        gate: Whether the sigmoid of a projection of the token scales what its heads mixed (Qwen3-Next).
        rotary: Rotary positions; None means none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "projection"] = "head"
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    gate: bool = False
    rotary: RotarySpec | None = None

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        if min(sizes) < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "attention needs positive sizes and num_heads a multiple of num_kv_heads. Received: "
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
            )
        if self.qk_norm_over not in ("head", "projection"):
            raise ValueError(f"qk_norm_over must be 'head' or 'projection'. Received: {self.qk_norm_over!r}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"a softcap must be positive, None for none. Received: softcap={self.softcap}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window must hold a token or more, None for all. Received: window={self.window}")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"a chunk must hold a token or more, None for all. Received: chunk={self.chunk}")
        if self.rotary is not None:
            self.rotary.width(self.head_dim)

    @property
    def logit_scale(self) -> float:
        """Factor on the logits."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotary_dim(self) -> int:
        """Width that the rotary tables are for."""
        return self.head_dim

    @property
    def cache_shape(self) -> KeyValueShape:
        """What a cache keeps for the layer."""
        return KeyValueShape(num_heads=self.num_kv_heads, head_dim=self.head_dim)


class AttentionMixer(nn.Module):
    """What mixers that attend share.

    Attributes:
        features: Width of the residual stream.
        spec: Shape of the attention.
        param_dtype: Storage dtype of the weights.
        implementation: Kernel of `dew.kernels.attention` for whole sequences; with a cache "auto" chooses.
        sequence_impl: Exchange of a mesh that splits positions, one of `dew.parallel.choice`.
    """

    features: int
    spec: Any
    param_dtype: Any = "float32"
    implementation: Implementation = "auto"
    sequence_impl: SequenceImplementation = "auto"

    def attend_rows(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K Hv"],
        **options: Any,
    ) -> Float[Array, "B T N Hv"]:
        """Attend within whole rows, with an exchange where positions are split; options as `sharded_attention`'s."""
        options["implementation"] = self.implementation
        if splits_positions(jax.sharding.get_abstract_mesh()):
            return sequence_attention(query, key, value, sequence_impl=self.sequence_impl, **options)
        return sharded_attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2), **options)


class SelfAttention(AttentionMixer):
    """Attend within a row, causally; fields as `AttentionMixer`'s."""

    spec: AttentionSpec

    def setup(self) -> None:
        """Declare the projections and the optional norms."""
        spec, dtype = self.spec, self.param_dtype
        narrow = (self.features,)
        queries, pairs = (spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)
        self.q_proj = Linear(narrow, queries, ("embed",), ("heads", "head_dim"), spec.bias, dtype)
        self.k_proj = Linear(narrow, pairs, ("embed",), ("kv", "head_dim"), spec.bias, dtype)
        self.v_proj = Linear(narrow, pairs, ("embed",), ("kv", "head_dim"), spec.bias, dtype)
        self.o_proj = Linear(queries, narrow, ("heads", "head_dim"), ("embed",), spec.out_bias, dtype)
        if spec.gate:
            self.gate_proj = Linear(narrow, queries, ("embed",), ("heads", "head_dim"), spec.bias, dtype)
        heads = (spec.num_heads,)
        self.sinks = declare(self, "sinks", heads, ("heads",), nn.initializers.zeros, dtype) if spec.sinks else None
        if spec.qk_norm is not None:
            dims = 1 if spec.qk_norm_over == "head" else 2
            sizes = (math.prod(heads[-dims:]) for heads in (queries, pairs))
            self.q_norm, self.k_norm = (Norm(size, spec.qk_norm, dtype, dims) for size in sizes)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        visibility: Visibility,
        rotary: Tables | None = None,
        cache: LayerCache | None = None,
        dropout: AttentionDropout | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Attend from the tokens of `x` to them and to the cache.

        Args:
            x: Normalised residual stream.
            visibility: Which keys each query reads where no window hides them.
            rotary: Tables of the tokens' positions; None where the spec has no rotary.
            cache: This layer's window on the cache; None for whole sequences.
            dropout: What drops the layer's probabilities in training, which has no cache; None drops none.

        Returns:
            The projected mixture, and the cache after the new keys.
        """
        query, key, value = self._heads(x, rotary)
        options: dict[str, Any] = {
            "visibility": limited(visibility, window=self.spec.window, chunk=self.spec.chunk),
            "scale": self.spec.logit_scale,
            "softcap": self.spec.softcap,
            "sinks": self.sinks,
        }
        if cache is None:
            mixed = self.attend_rows(query, key, value, dropout=dropout, **options)
        else:
            cache, key, value = cache.append(key, value)
            mixed = sharded_attention(query, key, value, **options)
        mixed = constrain(mixed, QUERY_NAMES)
        if self.spec.gate:
            mixed = jax.nn.sigmoid(constrain(self.gate_proj(x), QUERY_NAMES)) * mixed
        return self.o_proj(mixed), cache

    def _heads(self, x: Array, rotary: Tables | None) -> tuple[Array, Array, Array]:
        """Project to heads, normalise and rotate."""
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.spec.qk_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.spec.rotary is not None:
            assert rotary is not None, "the caller computes the tables of every rotary spec"
            query, key = (rotate(heads, rotary, self.spec.rotary) for heads in (query, key))
        return constrain(query, QUERY_NAMES), constrain(key, KEY_NAMES), constrain(value, KEY_NAMES)

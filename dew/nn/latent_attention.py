"""Multi-head latent attention: queries, keys and values expanded from narrow latents, a cache that keeps latents alone.

Entry points: `LatentAttentionSpec`, `LatentAttention` (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).
What a token leaves behind is one latent and one rotated key for all heads; with few new tokens their queries are
brought to the latents (the paper's absorbed projections) instead of expanding all cached ones.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.kernels.attention import Visibility, attention
from dew.kernels.dropout import AttentionDropout
from dew.nn.attention import AttentionMixer, AttentionSpec
from dew.nn.cache import LatentShape, LayerLatents
from dew.nn.linear import Linear
from dew.nn.norm import Norm, NormSpec
from dew.nn.rope import RotarySpec, Tables, YarnScaling, rotate, yarn_sharpening
from dew.nn.sharding import constrain
from dew.parallel.attention_kernel import sharded_attention
from dew.parallel.exchange import KEY_NAMES, QUERY_NAMES

NARROW_NAMES = ("activation_batch", "activation_length", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Shape of the attention.

    Attributes:
        num_heads: Heads; each has keys and values of its own.
        kv_lora_rank: Width R of the latent that keys and values are expanded from.
        qk_nope_head_dim: Width of the part of a query and key that is not rotated.
        qk_rope_head_dim: Width of the part that is; its key is shared by all heads.
        v_head_dim: Width of a value.
        norm: Norm of the latents.
        rotary: Rotary positions of the rotated part.
        q_lora_rank: Width of the latent that queries are expanded from; None projects them at once.
        bias: Whether the projections to the latents and the output projection add a bias.
        scale: Factor on the logits; None means (width of a query) ** -0.5, times the square of what YaRN's
            `mscale_all_dim` sharpens by.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm: NormSpec
    rotary: RotarySpec
    q_lora_rank: int | None = None
    bias: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        sizes = {
            name: getattr(self, name)
            for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        if self.q_lora_rank is not None:
            sizes["q_lora_rank"] = self.q_lora_rank
        if min(sizes.values()) < 1:
            listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(f"latent attention needs positive sizes. Received: {listed}")
        if self.rotary.width(self.qk_rope_head_dim) != self.qk_rope_head_dim:
            raise ValueError(
                "the whole part of qk_rope_head_dim is rotated, and qk_nope_head_dim is not. Received: "
                f"rotary.fraction={self.rotary.fraction}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        """Width that the rotary tables are for."""
        return self.qk_rope_head_dim

    @property
    def logit_scale(self) -> float:
        """Factor on the logits."""
        if self.scale is not None:
            return self.scale
        scaling, plain = self.rotary.scaling, self.qk_head_dim**-0.5
        if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
            return plain
        return plain * yarn_sharpening(scaling, scaling.mscale_all_dim) ** 2

    @property
    def cache_shape(self) -> LatentShape:
        """What a cache keeps for the layer."""
        return LatentShape(rank=self.kv_lora_rank, rotary_dim=self.qk_rope_head_dim)

    @property
    def expanded(self) -> AttentionSpec:
        """The heads that kernels and exchanges get of whole sequences, as wide as the wider of keys and values."""
        width = max(self.qk_head_dim, self.v_head_dim)
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=width, scale=self.logit_scale
        )

    def absorbs(self, num_tokens: int, num_slots: int) -> bool:
        """Say whether it takes fewer products to bring queries to the latents than to expand the latents.

        Args:
            num_tokens: New tokens T.
            num_slots: Slots S of the cache.
        """
        across = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        narrow = num_tokens * across + 2 * num_tokens * num_slots * (self.kv_lora_rank + self.qk_rope_head_dim)
        return narrow < num_slots * across + num_tokens * num_slots * (self.qk_head_dim + self.v_head_dim)


def attention_form(mixer: Any) -> AttentionSpec | None:
    """Give the heads that attention kernels get of a block's mixer; None where it does not attend.

    Args:
        mixer: Spec of the mixer.
    """
    if isinstance(mixer, LatentAttentionSpec):
        return mixer.expanded
    return mixer if isinstance(mixer, AttentionSpec) else None


class LatentAttention(AttentionMixer):
    """Attend within a row, causally; fields as `AttentionMixer`'s."""

    spec: LatentAttentionSpec

    def setup(self) -> None:
        """Declare the projections to latents and from them."""
        spec, dtype = self.spec, self.param_dtype
        narrow, rank = (self.features,), (spec.kv_lora_rank,)
        heads = ("heads", "head_dim")
        queries, values = (spec.num_heads, spec.qk_head_dim), (spec.num_heads, spec.v_head_dim)
        if spec.q_lora_rank is None:
            self.q_proj = Linear(narrow, queries, ("embed",), heads, False, dtype)
        else:
            query_rank = (spec.q_lora_rank,)
            self.q_a_proj = Linear(narrow, query_rank, ("embed",), ("latent",), spec.bias, dtype)
            self.q_a_norm = Norm(spec.q_lora_rank, spec.norm, dtype)
            self.q_b_proj = Linear(query_rank, queries, ("latent",), heads, False, dtype)
        kept = (spec.kv_lora_rank + spec.qk_rope_head_dim,)
        self.kv_a_proj = Linear(narrow, kept, ("embed",), ("latent",), spec.bias, dtype)
        self.kv_a_norm = Norm(spec.kv_lora_rank, spec.norm, dtype)
        keys = (spec.num_heads, spec.qk_nope_head_dim)
        self.k_b_proj = Linear(rank, keys, ("latent",), heads, False, dtype)
        self.v_b_proj = Linear(rank, values, ("latent",), heads, False, dtype)
        self.o_proj = Linear(values, narrow, heads, ("embed",), spec.bias, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        visibility: Visibility,
        rotary: Tables | None = None,
        cache: LayerLatents | None = None,
        dropout: AttentionDropout | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerLatents | None]:
        """Attend from the tokens of `x` to them and to the cache; arguments as `SelfAttention`'s.

        Returns:
            The projected mixture, and the cache after the new latents.
        """
        assert rotary is not None, "the caller computes the tables of every rotary spec"
        query, latents = self._queries(x, rotary), self._latents(x, rotary)
        options: dict[str, Any] = {"visibility": visibility, "scale": self.spec.logit_scale}
        if cache is None:
            mixed = self.attend_rows(query, *self._expanded(latents), dropout=dropout, **options)
        else:
            cache, latents = cache.append(latents)
            if self.spec.absorbs(x.shape[1], latents.shape[1]):
                mixed = self._read_latents(query, latents, visibility)
            else:
                key, value = (each.swapaxes(1, 2) for each in self._expanded(latents))
                mixed = sharded_attention(query, key, value, **options)
        return self.o_proj(constrain(mixed, QUERY_NAMES)), cache

    def _queries(self, x: Array, rotary: Tables) -> Float[Array, "B T N H"]:
        """Project to heads, by way of their latent where there is one, and rotate the last part of each."""
        spec = self.spec
        if spec.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_norm(constrain(self.q_a_proj(x), NARROW_NAMES)))
        fixed, turned = jnp.split(query, [spec.qk_nope_head_dim], axis=-1)
        return constrain(jnp.concatenate([fixed, rotate(turned, rotary, spec.rotary)], axis=-1), QUERY_NAMES)

    def _latents(self, x: Array, rotary: Tables) -> Float[Array, "B T R"]:
        """Give what a token leaves behind: the normalised latent, then the rotated key that all heads share."""
        kept = constrain(self.kv_a_proj(x), NARROW_NAMES)
        latent, shared = jnp.split(kept, [self.spec.kv_lora_rank], axis=-1)
        shared = rotate(shared[:, :, None], rotary, self.spec.rotary)[:, :, 0]
        return jnp.concatenate([self.kv_a_norm(latent), shared], axis=-1)

    def _expanded(self, latents: Float[Array, "B S R"]) -> tuple[Array, Array]:
        """Expand to the keys and values of every head, [B, S, N, H]."""
        latent, shared = jnp.split(latents, [self.spec.kv_lora_rank], axis=-1)
        key, value = self.k_b_proj(latent), self.v_b_proj(latent)
        shared = jnp.broadcast_to(shared[:, :, None], (*key.shape[:3], shared.shape[-1]))
        key = jnp.concatenate([key, shared], axis=-1)
        return constrain(key, KEY_NAMES), constrain(value, KEY_NAMES)

    def _read_latents(
        self, query: Float[Array, "B T N H"], latents: Float[Array, "B S R"], visibility: Visibility
    ) -> Float[Array, "B T N Hv"]:
        """Attend to the latents themselves, as one key for all heads, and expand what each head mixed of them."""
        spec, dtype = self.spec, query.dtype
        fixed, turned = jnp.split(query, [spec.qk_nope_head_dim], axis=-1)
        brought = jnp.einsum("BTNH,RNH->BTNR", fixed, self.k_b_proj.kernel.astype(dtype))
        query = constrain(jnp.concatenate([brought, turned], axis=-1), QUERY_NAMES)
        # The shared key is mixed too and dropped after: cut off before, XLA would copy the whole cache. The call needs
        # no wrapping for a mesh: kernels that GSPMD cannot split do not run with a cache, and every device reads all.
        stored = latents[:, None]
        mixed = attention(query, stored, stored, visibility=visibility, scale=spec.logit_scale, implementation="xla")
        narrow = mixed[..., : spec.kv_lora_rank]
        return jnp.einsum("BTNR,RNH->BTNH", narrow, self.v_b_proj.kernel.astype(dtype))

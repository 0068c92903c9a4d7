"""What the families with latent attention share: the names of its weights and its config fields, both ways.

Entry points: `LATENT_WEIGHTS`, `latent_attention_of`, `latent_config`. The published projection from a latent holds
each head's key and value side by side; here they are leaves of their own.
"""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.latent_attention import LatentAttentionSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec
from dew.pretrained.families.decoder import MAX_HEAD_DIM
from dew.pretrained.families.family import linear, norm, uniform
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import write_rotary
from dew.pretrained.recipe import Weight, fused_weights
from dew.pretrained.source import CheckpointError

LATENT_NORM = NormSpec(eps=1e-6)
"""Norm of the latents; the classes leave its epsilon at their norm's default, whatever `rms_norm_eps` says."""
_PATH, _TENSOR = "params/layers_{i}/self_attn", "model.layers.{i}.self_attn"
_EXPANDED = "(N H) R -> R N H"
LATENT_WEIGHTS = (
    *linear(f"{_PATH}/q_a_proj", f"{_TENSOR}.q_a_proj", "R D -> D R"),
    *norm(f"{_PATH}/q_a_norm", f"{_TENSOR}.q_a_layernorm"),
    Weight(f"{_PATH}/q_b_proj/kernel", f"{_TENSOR}.q_b_proj.weight", _EXPANDED),
    *linear(f"{_PATH}/kv_a_proj", f"{_TENSOR}.kv_a_proj_with_mqa", "R D -> D R"),
    *norm(f"{_PATH}/kv_a_norm", f"{_TENSOR}.kv_a_layernorm"),
    *fused_weights(
        f"{_TENSOR}.kv_b_proj.weight",
        (f"{_PATH}/k_b_proj/kernel", _EXPANDED, "H"),
        (f"{_PATH}/v_b_proj/kernel", _EXPANDED, "H"),
    ),
)


def latent_attention_of(fields: Fields, rotary: RotarySpec, *, default_heads: int) -> LatentAttentionSpec:
    """Read the attention of a config.

    Args:
        fields: The config.
        rotary: Its rotary positions.
        default_heads: Heads of a config that states none.

    Raises:
        CheckpointError: If heads share keys, widths that follow from others are stated otherwise, or one is too large.
    """
    heads = fields.count("num_attention_heads", default_heads)
    sizes = {
        "kv_lora_rank": fields.count("kv_lora_rank", 512),
        "qk_nope_head_dim": fields.count("qk_nope_head_dim", 128),
        "qk_rope_head_dim": fields.count("qk_rope_head_dim", 64),
        "v_head_dim": fields.count("v_head_dim", 128),
    }
    rope, nope = sizes["qk_rope_head_dim"], sizes["qk_nope_head_dim"]
    # The classes work the last two out and write them beside the others.
    implied = {"num_key_value_heads": heads, "head_dim": rope, "qk_head_dim": nope + rope}
    for name, value in implied.items():
        stated = fields.get(name, value)
        if type(stated) is not int or stated != value:
            raise CheckpointError(
                f"{fields.where}: with latent attention {name} is {value}: every head has keys of its own, "
                f"qk_rope_head_dim={rope} wide where they turn and qk_nope_head_dim={nope} where not. Received: "
                f"{name}={stated!r}"
            )
    if nope + rope > MAX_HEAD_DIM:  # tables of frequencies are made from it
        raise CheckpointError(f"{fields.where}: heads of {nope + rope} dimensions; at most {MAX_HEAD_DIM}.")
    try:
        return LatentAttentionSpec(
            num_heads=heads,
            q_lora_rank=fields.optional_count("q_lora_rank", 1536),
            norm=LATENT_NORM,
            rotary=rotary,
            bias=fields.flag("attention_bias", False),
            **sizes,
        )
    except ValueError as error:
        raise CheckpointError(f"{fields.where}: {error}") from None


def latent_config(module: CausalTransformer) -> dict[str, Any]:
    """Write the attention; the inverse of `latent_attention_of`.

    Raises:
        ValueError: If a layer has other attention, or two layers differ.
    """

    def written(layer: LayerSpec) -> dict[str, Any]:
        spec = layer.mixer
        if not isinstance(spec, LatentAttentionSpec):
            raise ValueError("the config has latent attention in every layer")
        return {
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_heads,
            "q_lora_rank": spec.q_lora_rank,
            "kv_lora_rank": spec.kv_lora_rank,
            "qk_nope_head_dim": spec.qk_nope_head_dim,
            "qk_rope_head_dim": spec.qk_rope_head_dim,
            "v_head_dim": spec.v_head_dim,
            "head_dim": spec.qk_rope_head_dim,
            "attention_bias": spec.bias,
            "rms_norm_eps": layer.norm.eps,
            "rope_parameters": write_rotary(spec.rotary, module.max_length),
        }

    each = [written(layer) for layer in module.layers]
    return uniform({name: [values[name] for values in each] for name in each[0]})

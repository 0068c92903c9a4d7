"""Phi-3 and Phi-4, dense: Llama whose projections are stored fused, with partial rotation and longrope."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    divided_head_dim,
    layer_config,
    mlp_of,
    model_config,
)
from dew.pretrained.families.family import IGNORABLE, Family, decoder_weights_but
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.recipe import fused_weights

ATTENTION, MLP = "params/layers_{i}/self_attn", "params/layers_{i}/mlp"
FUSED = (
    *fused_weights(
        "model.layers.{i}.self_attn.qkv_proj.weight",
        (f"{ATTENTION}/q_proj/kernel", "(N H) D -> D N H", "N"),
        (f"{ATTENTION}/k_proj/kernel", "(K H) D -> D K H", "K"),
        (f"{ATTENTION}/v_proj/kernel", "(K H) D -> D K H", "K"),
    ),
    *fused_weights(
        "model.layers.{i}.mlp.gate_up_proj.weight",
        (f"{MLP}/gate_proj/kernel", "F D -> D F", "F"),
        (f"{MLP}/up_proj/kernel", "F D -> D F", "F"),
    ),
)
WEIGHTS = decoder_weights_but(*FUSED)


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Phi3Config`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-5))
    max_length = fields.count("max_position_embeddings", 4096)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        window=fields.optional_count("sliding_window", None),
        rotary=read_rotary(fields, max_length, partial=True, kinds=ROPE_TYPES, default_original=4096),
    )
    layer = LayerSpec(mixer=attention, mlp=mlp_of(fields), norm=norm)
    layers, rate = (layer,) * fields.count("num_hidden_layers"), fields.rate("resid_pdrop")
    arguments = arguments_of(fields, layers, norm, max_length, dropout_rate=rate)
    fields.finish({"embd_pdrop": (0, 0.0)})
    return arguments


ROPE_TYPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Early releases call longrope by the two other names."""


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Phi3Config`."""
    config = layer_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length, partial=True),
            "sliding_window": layer.attention.window,
        },
    )
    if config.pop("head_dim") * config["num_attention_heads"] != module.features:
        raise ValueError("a Phi-3 config takes the width of a head from that of the model")
    rotary = config["rope_parameters"]
    if rotary["rope_type"] not in ("default", "longrope"):
        raise ValueError(f"a Phi-3 config scales by longrope alone. Received: rope_type={rotary['rope_type']!r}")
    if "original_max_position_embeddings" in rotary:
        config["original_max_position_embeddings"] = rotary["original_max_position_embeddings"]
    return {**model_config(module), **config, "resid_pdrop": module.dropout_rate}


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=WEIGHTS,
    ignorable=IGNORABLE,
)

"""GLM-4 (0414), dense: norms on both sides, partial rotation of neighbouring dimensions, gate and up stored as one."""

import dataclasses
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import arguments_of, attention_of, layer_config, mlp_of, model_config
from dew.pretrained.families.family import IGNORABLE, Family, decoder_weights_but
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.recipe import Weight, fused_weights

# Our name of a norm, and the file's. The one in front of the perceptron has Llama's name there.
NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
MLP = "params/layers_{i}/mlp"
WEIGHTS = decoder_weights_but(
    *fused_weights(
        "model.layers.{i}.mlp.gate_up_proj.weight",
        (f"{MLP}/gate_proj/kernel", "F D -> D F", "F"),
        (f"{MLP}/up_proj/kernel", "F D -> D F", "F"),
    ),
    *(
        Weight(f"params/layers_{{i}}/{ours}/scale", f"model.layers.{{i}}.{theirs}.weight", "D -> D")
        for ours, theirs in NORMS.items()
    ),
)


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Glm4Config`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1.5625e-7))
    max_length = fields.count("max_position_embeddings", 131072)
    rotary = read_rotary(fields, max_length, default_fraction=0.5, partial=True)
    attention = attention_of(
        fields,
        head_dim=fields.count("head_dim", 128),
        default_key_value_heads=2,
        bias=fields.flag("attention_bias", True),
        rotary=dataclasses.replace(rotary, interleaved=True),
    )
    layer = LayerSpec(mixer=attention, mlp=mlp_of(fields), norm=norm, placement="both")
    arguments = arguments_of(fields, (layer,) * fields.count("num_hidden_layers"), norm, max_length)
    fields.finish()
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Glm4Config`."""
    config = layer_config(
        module,
        lambda layer: {
            "attention_bias": layer.attention.bias,
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length, partial=True),
        },
    )
    return {**model_config(module), **config}


FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=WEIGHTS,
    ignorable=IGNORABLE,
)

"""Qwen3, the dense models: a norm of every query and key head and a head width of its own."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import attention_of, dense_mlp, layer_config, model_config
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.qwen2 import windowed, windows_config
from dew.pretrained.families.rotary import read_rotary, write_rotary


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Qwen3Config`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    max_length = fields.count("max_position_embeddings", 32768)
    bias = fields.flag("attention_bias", False)
    attention = attention_of(
        fields,
        # The config class has its own default: a Qwen3 head is 128 wide whatever the width of the model.
        head_dim=fields.count("head_dim", 128),
        default_key_value_heads=32,
        bias=bias,
        out_bias=bias,
        qk_norm=norm,
        rotary=read_rotary(fields, max_length),
    )
    return windowed(fields, attention, norm, max_length)


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Qwen3Config`."""
    if any(layer.attention.qk_norm != layer.norm for layer in module.layers):
        raise ValueError("a Qwen3 config states one norm for the layers and for queries and keys")
    if any(dense_mlp(layer).bias for layer in module.layers):
        raise ValueError("a Qwen3 config cannot express biases in the mlp")
    config = layer_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "attention_bias": layer.attention.bias,
        },
    )
    return {**model_config(module), **config, **windows_config(module)}


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

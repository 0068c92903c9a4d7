"""Mistral 7B and the models that use its config: Llama in which every layer may have a sliding window."""

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
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `MistralConfig`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    max_length = fields.count("max_position_embeddings", 4096 * 32)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        default_key_value_heads=8,
        window=fields.optional_count("sliding_window", 4096),
        rotary=read_rotary(fields, max_length),
    )
    layer = LayerSpec(mixer=attention, mlp=mlp_of(fields), norm=norm)
    arguments = arguments_of(fields, (layer,) * fields.count("num_hidden_layers"), norm, max_length)
    fields.finish()
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `MistralConfig`; a model without windows says null, since the class has a default."""
    return {
        **model_config(module),
        **layer_config(
            module,
            lambda layer: {
                "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
                "sliding_window": layer.attention.window,
            },
        ),
    }


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

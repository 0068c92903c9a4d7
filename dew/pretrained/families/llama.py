"""Llama 2, 3, 3.1 and the models that use its config: SmolLM and others with `model_type: llama`."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    dense_mlp,
    divided_head_dim,
    layer_config,
    mlp_of,
    model_config,
)
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `LlamaConfig`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    max_length = fields.count("max_position_embeddings", 2048)
    bias = fields.flag("attention_bias", False)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        bias=bias,
        out_bias=bias,
        rotary=read_rotary(fields, max_length),
    )
    layer = LayerSpec(mixer=attention, mlp=mlp_of(fields, bias=fields.flag("mlp_bias", False)), norm=norm)
    layers = (layer,) * fields.count("num_hidden_layers")
    arguments = arguments_of(fields, layers, norm, max_length)
    fields.finish({"layer_types": (["full_attention"] * len(layers),)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `LlamaConfig`."""
    if any(layer.attention.qk_norm is not None for layer in module.layers):
        raise ValueError("a Llama config cannot express norms of queries and keys")
    return {
        **model_config(module),
        **layer_config(
            module,
            lambda layer: {
                "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
                "attention_bias": layer.attention.bias,
                "mlp_bias": dense_mlp(layer).bias,
            },
        ),
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

"""OLMo 2: norms after attention and perceptron and none before, queries and keys normalised over all heads together."""

import dataclasses
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec
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


def layer_of(fields: Fields, rotary: RotarySpec) -> LayerSpec:
    """Read a block of OLMo 2 or 3."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-5), cast="after_scale")
    bias = fields.flag("attention_bias", False)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        bias=bias,
        out_bias=bias,
        qk_norm=norm,
        qk_norm_over="projection",
        rotary=precise(rotary),
    )
    return LayerSpec(mixer=attention, mlp=mlp_of(fields), norm=norm, placement="post")


def precise(rotary: RotarySpec) -> RotarySpec:
    """Give rotary positions the precision of OLMo: tables and rotation in float32."""
    return dataclasses.replace(rotary, in_float32=True, round_tables=False)


def translate(fields: Fields) -> dict[str, Any]:
    """Translate an `Olmo2Config`."""
    max_length = fields.count("max_position_embeddings", 2048)
    layer = layer_of(fields, read_rotary(fields, max_length))
    arguments = arguments_of(fields, (layer,) * fields.count("num_hidden_layers"), layer.norm, max_length)
    fields.finish()
    return arguments


def blocks_config(module: CausalTransformer, **own: Any) -> dict[str, Any]:
    """Write what the configs of OLMo 2 and 3 share.

    Args:
        module: The model.
        **own: Function of a block for each further field.

    Raises:
        ValueError: If the heads are not as wide as the config implies.
    """
    config = layer_config(
        module,
        lambda layer: {
            "attention_bias": layer.attention.bias,
            **{name: written(layer) for name, written in own.items()},
        },
    )
    if config.pop("head_dim") * config["num_attention_heads"] != module.features:
        raise ValueError("an OLMo config takes the width of a head from that of the model")
    return {**model_config(module), **config}


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write an `Olmo2Config`."""
    return blocks_config(module, rope_parameters=lambda layer: write_rotary(layer.attention.rotary, module.max_length))


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

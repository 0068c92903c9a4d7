"""Gemma 2: every second layer has a window, norms before and after each part, bounded attention and output logits."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import HeadSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    kinds_config,
    layer_config,
    mlp_of,
    model_config,
    windows_of,
    with_attention,
)
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.gemma import NEUTRAL, embedding_of, norm_of
from dew.pretrained.families.rotary import read_rotary, write_rotary


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Gemma2Config`."""
    norm, max_length = norm_of(fields), fields.count("max_position_embeddings", 8192)
    bias = fields.flag("attention_bias", False)
    attention = attention_of(
        fields,
        head_dim=fields.count("head_dim", 256),
        bias=bias,
        out_bias=bias,
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=fields.optional_number("attn_logit_softcapping", 50.0),
        rotary=read_rotary(fields, max_length),
    )
    window, count = fields.optional_count("sliding_window", 4096), fields.count("num_hidden_layers")
    windows = windows_of(fields, [("sliding_attention", "full_attention")[index % 2] for index in range(count)], window)
    mlp = mlp_of(fields, name="hidden_activation", default="gelu_pytorch_tanh")
    layer = LayerSpec(mixer=attention, mlp=mlp, norm=norm, placement="both")
    layers = tuple(with_attention(layer, window=each) for each in windows)
    head = HeadSpec(softcap=fields.optional_number("final_logit_softcapping", 30.0))
    arguments = arguments_of(fields, layers, norm, max_length, tied=True, embedding=embedding_of(fields), head=head)
    fields.get("hidden_act", None)  # without effect beside hidden_activation
    fields.finish({**NEUTRAL, "sliding_window_size": (window,)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Gemma2Config`."""
    config = layer_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "attention_bias": layer.attention.bias,
            "query_pre_attn_scalar": query_scalar(layer),
            "attn_logit_softcapping": layer.attention.softcap,
        },
        activation="hidden_activation",
    )
    head = {"final_logit_softcapping": module.head.softcap}
    return {**model_config(module), **config, **kinds_config(module), **head}


def query_scalar(layer: LayerSpec) -> int:
    """Write the factor on the logits as the whole number whose inverse root it is."""
    return round(layer.attention.logit_scale**-2)


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

"""Gemma 2: every second layer has a window, norms before and after each part, bounded attention and output logits."""

from collections.abc import Callable
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import HeadSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import (
    kinds_config,
    layer_config,
    mlp_of,
    model_config,
    windows_of,
    with_attention,
)
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.gemma import NEUTRAL, heads_of, norm_of, tied_arguments
from dew.pretrained.families.rotary import read_rotary, write_rotary


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Gemma2Config`."""
    norm, max_length = norm_of(fields), fields.count("max_position_embeddings", 8192)
    softcap = fields.optional_number("attn_logit_softcapping", 50.0)
    layer = layer_of(fields, norm, softcap=softcap, rotary=read_rotary(fields, max_length))
    window, count = fields.optional_count("sliding_window", 4096), fields.count("num_hidden_layers")
    windows = windows_of(fields, [("sliding_attention", "full_attention")[index % 2] for index in range(count)], window)
    layers = tuple(with_attention(layer, window=each) for each in windows)
    head = HeadSpec(softcap=fields.optional_number("final_logit_softcapping", 30.0))
    arguments = tied_arguments(fields, layers, norm=norm, max_length=max_length, head=head)
    fields.get("hidden_act", None)  # without effect beside hidden_activation
    fields.finish({**NEUTRAL, "sliding_window_size": (window,)})
    return arguments


def layer_of(fields: Fields, norm: NormSpec, **attention: Any) -> LayerSpec:
    """Read a block of Gemma 2 or 3.

    Args:
        fields: The config.
        norm: Every norm.
        **attention: Further fields of its attention.
    """
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    mlp = mlp_of(fields, name="hidden_activation", default="gelu_pytorch_tanh")
    heads = heads_of(fields, default_key_value_heads=4, scale=scale, **attention)
    return LayerSpec(mixer=heads, mlp=mlp, norm=norm, placement="both")


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Gemma2Config`."""
    rotary = {"rope_parameters": lambda layer: write_rotary(layer.attention.rotary, module.max_length)}
    return blocks_config(module, **rotary, attn_logit_softcapping=lambda layer: layer.attention.softcap)


def blocks_config(module: CausalTransformer, **own: Callable[[LayerSpec], Any]) -> dict[str, Any]:
    """Write what the configs of Gemma 2 and 3 share.

    Args:
        module: The model.
        **own: Function of a block for each further field.
    """
    config = layer_config(
        module,
        lambda layer: {
            "attention_bias": layer.attention.bias,
            # The factor on the logits is written as the whole number whose inverse root it is.
            "query_pre_attn_scalar": round(layer.attention.logit_scale**-2),
            **{name: written(layer) for name, written in own.items()},
        },
        activation="hidden_activation",
    )
    head = {"final_logit_softcapping": module.head.softcap}
    return {**model_config(module), **config, **kinds_config(module), **head}


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

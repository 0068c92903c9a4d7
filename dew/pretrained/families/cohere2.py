"""Cohere 2 (Command R7B): one norm for both parallel parts, scaled logits, rotary positions only beside windows."""

import dataclasses
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import HeadSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    implied_head_dim,
    kinds_config,
    layer_config,
    mlp_of,
    model_config,
    windows_of,
    with_attention,
)
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary

# What the published configs say beside the fields of the config class.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "order_of_interleaved_layers": ("local_attn_first",),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1, 1.0),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "use_parallel_embedding": (True, False),
    "use_qk_norm": (False,),
}


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Cohere2Config`."""
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), cast="after_scale")
    max_length, head_dim = fields.count("max_position_embeddings", 8192), implied_head_dim(fields)
    bias = fields.flag("attention_bias", False)
    rotary = dataclasses.replace(read_rotary(fields, max_length), interleaved=True, in_float32=True)
    attention = attention_of(fields, head_dim=head_dim, bias=bias, out_bias=bias)
    layer = LayerSpec(mixer=attention, mlp=mlp_of(fields), norm=norm, placement="parallel_one_norm")
    period, count = fields.count("sliding_window_pattern", 4), fields.count("num_hidden_layers")
    kinds = ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(count)]
    windows = windows_of(fields, kinds, fields.optional_count("sliding_window", 4096))
    layers = tuple(with_attention(layer, window=each, rotary=rotary if each else None) for each in windows)
    head = HeadSpec(scale=fields.number("logit_scale", 0.0625))
    arguments = arguments_of(fields, layers, norm, max_length, tied=True, head=head)
    fields.finish({**NEUTRAL, "head_dim": (head_dim,), "layer_switch": (period,)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Cohere2Config`."""
    config = layer_config(module, lambda layer: {"attention_bias": layer.attention.bias}, eps="layer_norm_eps")
    rotaries = [layer.attention.rotary for layer in module.layers if layer.attention.rotary is not None]
    rotary = {"rope_parameters": write_rotary(rotaries[0], module.max_length)} if rotaries else {}
    return {**model_config(module), **config, **kinds_config(module), **rotary, "logit_scale": module.head.scale}


FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

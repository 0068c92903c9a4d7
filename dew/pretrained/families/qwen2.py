"""Qwen2 and Qwen2.5, dense: Llama with biases on queries, keys and values, and windows on its later layers if asked."""

from typing import Any

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    divided_head_dim,
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


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Qwen2Config`."""
    max_length = fields.count("max_position_embeddings", 32768)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        default_key_value_heads=32,
        bias=True,
        rotary=read_rotary(fields, max_length),
    )
    return windowed(fields, attention, NormSpec(eps=fields.number("rms_norm_eps", 1e-6)), max_length)


def windowed(fields: Fields, attention: AttentionSpec, norm: NormSpec, max_length: int) -> dict[str, Any]:
    """Finish reading a Qwen config: which layers have the window, and what is outside the blocks.

    Args:
        fields: The config.
        attention: Attention of a layer without a window.
        norm: Every norm.
        max_length: Longest context in tokens.

    Returns:
        Arguments of `CausalTransformer`.
    """
    count = fields.count("num_hidden_layers")
    window = fields.optional_count("sliding_window", 4096)
    first = fields.count("max_window_layers", 28, least=0)
    if not fields.flag("use_sliding_window", False):
        window = None
    slides = [window is not None and index >= first for index in range(count)]
    windows = windows_of(fields, ["sliding_attention" if each else "full_attention" for each in slides], window)
    layer = LayerSpec(mixer=attention, mlp=mlp_of(fields), norm=norm)
    layers = tuple(with_attention(layer, window=each) for each in windows)
    arguments = arguments_of(fields, layers, norm, max_length)
    fields.finish()
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Qwen2Config`."""
    config = layer_config(
        module, lambda layer: {"rope_parameters": write_rotary(layer.attention.rotary, module.max_length)}
    )
    if config.pop("head_dim") * config["num_attention_heads"] != module.features:
        raise ValueError("a Qwen2 config takes the width of a head from that of the model")
    return {**model_config(module), **config, **windows_config(module)}


def windows_config(module: CausalTransformer) -> dict[str, Any]:
    """Write which layers have a window, in the fields of a Qwen config."""
    kinds = kinds_config(module)
    if kinds["sliding_window"] is None:
        return {"layer_types": kinds["layer_types"], "use_sliding_window": False}
    return {**kinds, "use_sliding_window": True}


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

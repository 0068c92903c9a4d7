"""SmolLM3: Llama in which every fourth layer has no rotary positions."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    dense_mlp,
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
from dew.pretrained.source import CheckpointError


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `SmolLM3Config`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    max_length = fields.count("max_position_embeddings", 32768)
    bias = fields.flag("attention_bias", False)
    rotary = read_rotary(fields, max_length, default_theta=2e6)
    attention = attention_of(
        fields, head_dim=divided_head_dim(fields), default_key_value_heads=4, bias=bias, out_bias=bias
    )
    layer = LayerSpec(mixer=attention, mlp=mlp_of(fields, bias=fields.flag("mlp_bias", False)), norm=norm)
    rotates = _rotates(fields, fields.count("num_hidden_layers"))
    window = fields.optional_count("sliding_window", None)
    if not fields.flag("use_sliding_window", False):
        window = None
    slides = [window is not None and not rotated for rotated in rotates]
    windows = windows_of(fields, ["sliding_attention" if each else "full_attention" for each in slides], window)
    layers = tuple(
        with_attention(layer, window=each, rotary=rotary if rotated else None)
        for each, rotated in zip(windows, rotates, strict=True)
    )
    arguments = arguments_of(fields, layers, norm, max_length, tied=True)
    fields.finish()
    return arguments


def _rotates(fields: Fields, count: int) -> list[bool]:
    """Read which layers rotate: `no_rope_layers` says 1 for a layer that does."""
    interval = fields.count("no_rope_layer_interval", 4)
    flags = fields.get("no_rope_layers", [int((index + 1) % interval != 0) for index in range(count)])
    if not isinstance(flags, list) or len(flags) < count or not all(flag in (0, 1) for flag in flags):
        raise CheckpointError(
            f"{fields.where}: no_rope_layers must say 1 for each of {count} layers that rotates and 0 for the others. "
            f"Received: no_rope_layers={flags!r}"
        )
    return [bool(flag) for flag in flags[:count]]


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `SmolLM3Config`."""
    config = layer_config(
        module, lambda layer: {"attention_bias": layer.attention.bias, "mlp_bias": dense_mlp(layer).bias}
    )
    if config.pop("head_dim") * config["num_attention_heads"] != module.features:
        raise ValueError("a SmolLM3 config takes the width of a head from that of the model")
    rotaries = [layer.attention.rotary for layer in module.layers]
    rotated = [rotary for rotary in rotaries if rotary is not None]
    if not rotated or rotated != [rotated[0]] * len(rotated):
        raise ValueError("a SmolLM3 config states the rotary positions of the layers that have them once")
    kinds = kinds_config(module)
    return {
        **model_config(module),
        **config,
        **kinds,
        "use_sliding_window": kinds["sliding_window"] is not None,
        "rope_parameters": write_rotary(rotated[0], module.max_length),
        "no_rope_layers": [int(rotary is not None) for rotary in rotaries],
    }


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

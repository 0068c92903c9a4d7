"""OLMo 3: OLMo 2 with a window on three layers of four, and rotary scaling on the fourth alone."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer
from dew.pretrained.families.decoder import arguments_of, kinds_config, windows_of, with_attention
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.olmo2 import blocks_config, layer_of, precise
from dew.pretrained.families.rotary import read_rotaries, write_rotaries

BASES = {"full_attention": ("rope_theta", 5e5), "sliding_attention": ("rope_theta", 5e5)}


def translate(fields: Fields) -> dict[str, Any]:
    """Translate an `Olmo3Config`."""
    max_length = fields.count("max_position_embeddings", 2048)
    rotary = read_rotaries(fields, max_length, BASES)
    layer = layer_of(fields, rotary["full_attention"])
    slides = [bool((index + 1) % 4) for index in range(fields.count("num_hidden_layers"))]
    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    windows = windows_of(fields, kinds, fields.optional_count("sliding_window", 4096))
    local = with_attention(layer, rotary=precise(rotary["sliding_attention"]))
    layers = tuple(layer if window is None else with_attention(local, window=window) for window in windows)
    arguments = arguments_of(fields, layers, layer.norm, max_length)
    fields.finish()
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write an `Olmo3Config`."""
    kinds = kinds_config(module)
    rotary = write_rotaries(
        kinds["layer_types"], [layer.attention.rotary for layer in module.layers], module.max_length
    )
    return {**blocks_config(module), **kinds, "rope_parameters": rotary}


FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

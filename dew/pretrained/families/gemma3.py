"""Gemma 3, the text models: five layers with a window and a rotary base of their own, then one without."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer
from dew.nn.embed import HeadSpec
from dew.pretrained.families.decoder import windows_of, with_attention
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.gemma import NEUTRAL, norm_of, tied_arguments
from dew.pretrained.families.gemma2 import blocks_config, layer_of
from dew.pretrained.families.rotary import read_rotaries, write_rotaries

# Base of each kind of layer, and the field that states it where no rotary parameters do.
BASES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Gemma3TextConfig`."""
    norm, max_length = norm_of(fields), fields.count("max_position_embeddings", 131072)
    window, rotary = fields.optional_count("sliding_window", 4096), read_rotaries(fields, max_length, BASES)
    # Older configs state the period instead of the kinds, and the reference still writes it beside them.
    period = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", 6))
    count = fields.count("num_hidden_layers")
    slides = [bool((index + 1) % period) for index in range(count)]
    windows = windows_of(fields, ["sliding_attention" if each else "full_attention" for each in slides], window)
    layer = layer_of(fields, norm, qk_norm=norm)
    layers = tuple(
        with_attention(layer, window=each, rotary=rotary["full_attention" if each is None else "sliding_attention"])
        for each in windows
    )
    head = HeadSpec(softcap=fields.optional_number("final_logit_softcapping", None))
    arguments = tied_arguments(fields, layers, norm=norm, max_length=max_length, head=head)
    # The reference reads attn_logit_softcapping and does not apply it, so only its absence is unambiguous.
    fields.finish({**NEUTRAL, "attn_logit_softcapping": (None,)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Gemma3TextConfig`."""
    config = blocks_config(module)
    rotaries = [layer.attention.rotary for layer in module.layers]
    return {**config, "rope_parameters": write_rotaries(config["layer_types"], rotaries, module.max_length)}


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

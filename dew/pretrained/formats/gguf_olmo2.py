"""GGUF files of the `olmo2` architecture: OLMo 2, and OLMo 3, whose files have the same name and a window."""

from typing import Any

from dew.pretrained.formats.architecture import (
    DECODER_LAYER_TENSORS,
    GgufArchitecture,
    GgufFields,
    decoder_fields,
    layer_kinds,
    pop_implied_head_dim,
)

_LAYER_TENSORS = {
    **{name: stem for name, stem in DECODER_LAYER_TENSORS.items() if name not in ("attn_norm", "ffn_norm")},
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


PERIOD = 4


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to an `Olmo2Config`, or to an `Olmo3Config` where there is a window."""
    shared = decoder_fields(fields)
    pop_implied_head_dim(fields, shared)
    config = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], **shared, "hidden_act": "silu"}
    if fields.get("attention.sliding_window", 0):
        rotary = shared["rope_parameters"]
        local = {"rope_type": "default", "rope_theta": rotary["rope_theta"]}
        config |= {
            "model_type": "olmo3",
            "architectures": ["Olmo3ForCausalLM"],
            "sliding_window": fields.count("attention.sliding_window"),
            "layer_types": layer_kinds(fields, shared["num_hidden_layers"], PERIOD),
            "rope_parameters": {"full_attention": rotary, "sliding_attention": local},
        }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="olmo2", translate=translate, layer_tensors=_LAYER_TENSORS)

"""GGUF files of the `cohere2` architecture: Command R7B, with layer norms and three windows of four layers."""

from typing import Any

from dew.pretrained.formats.architecture import (
    DECODER_LAYER_TENSORS,
    GgufArchitecture,
    GgufFields,
    decoder_fields,
    layer_kinds,
)

# One norm stands before both parts of a layer.
_LAYER_TENSORS = {name: stem for name, stem in DECODER_LAYER_TENSORS.items() if name != "ffn_norm"}
PERIOD = 4


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `Cohere2Config`."""
    shared = decoder_fields(fields, layer_norm="layer_norm_eps")
    config = {
        "model_type": "cohere2",
        "architectures": ["Cohere2ForCausalLM"],
        **shared,
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "hidden_act": "silu",
        "logit_scale": fields.number("logit_scale"),
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": layer_kinds(fields, shared["num_hidden_layers"], PERIOD),
    }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="cohere2", translate=translate, layer_tensors=_LAYER_TENSORS)

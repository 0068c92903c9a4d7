"""GGUF files of the `granite` architecture: Llama with four factors."""

from typing import Any

from dew.pretrained.formats.architecture import (
    GgufArchitecture,
    GgufFields,
    decoder_fields,
    pop_implied_head_dim,
    rotated_neighbours,
)


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `GraniteConfig`."""
    shared = decoder_fields(fields)
    head_dim = pop_implied_head_dim(fields, shared)
    config = {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        **shared,
        "hidden_act": "silu",
        "attention_multiplier": fields.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="granite", translate=translate, row_order=rotated_neighbours)

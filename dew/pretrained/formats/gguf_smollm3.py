"""GGUF files of the `smollm3` architecture: Llama in which every fourth layer does not rotate."""

from typing import Any

from dew.pretrained.formats.architecture import (
    GgufArchitecture,
    GgufFields,
    decoder_fields,
    pop_implied_head_dim,
    rotated_neighbours,
)

PERIOD = 4


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `SmolLM3Config`."""
    shared = decoder_fields(fields)
    pop_implied_head_dim(fields, shared)
    config = {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        **shared,
        "hidden_act": "silu",
        "no_rope_layer_interval": PERIOD,
        "no_rope_layers": [int((layer + 1) % PERIOD != 0) for layer in range(shared["num_hidden_layers"])],
    }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="smollm3", translate=translate, row_order=rotated_neighbours)

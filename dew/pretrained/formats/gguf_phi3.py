"""GGUF files of the `phi3` architecture: Phi-3 and Phi-4. The factors of longrope are tensors of the file."""

from typing import Any

from dew.pretrained.formats.architecture import (
    GgufArchitecture,
    GgufFields,
    decoder_fields,
    pop_implied_head_dim,
)

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `Phi3Config`."""
    shared = decoder_fields(fields, partial=True)
    pop_implied_head_dim(fields, shared)
    max_length = shared["max_position_embeddings"]
    window = fields.get("attention.sliding_window", 0)
    config = {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        **shared,
        "hidden_act": "silu",
        "sliding_window": fields.count("attention.sliding_window") if window else None,
        "original_max_position_embeddings": shared["rope_parameters"].get(
            "original_max_position_embeddings", max_length
        ),
    }
    # The converter writes these of a model without longrope too.
    fields.finish({"rope.scaling.original_context_length": (max_length,), "rope.scaling.attn_factor": (1.0,)})
    return config


ARCHITECTURE = GgufArchitecture(name="phi3", translate=translate, layer_tensors=_LAYER_TENSORS)

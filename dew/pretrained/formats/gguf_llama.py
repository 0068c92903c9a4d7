"""GGUF files of the `llama` architecture: Llama 2, 3, 3.1 to 3.3, SmolLM, and others with Llama's layers."""

from typing import Any

from dew.pretrained.formats.architecture import GgufArchitecture, GgufFields, decoder_fields, rotated_neighbours


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `LlamaConfig`."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **decoder_fields(fields),
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": fields.has_tensor("blk.0.ffn_gate.bias"),
        "hidden_act": "silu",
    }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="llama", translate=translate, row_order=rotated_neighbours)

"""GGUF files of the `qwen3` architecture: Qwen3, the dense models."""

from typing import Any

from dew.pretrained.formats.architecture import (
    DECODER_LAYER_TENSORS,
    GgufArchitecture,
    GgufFields,
    decoder_fields,
)

_LAYER_TENSORS = {**DECODER_LAYER_TENSORS, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `Qwen3Config`."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **decoder_fields(fields, head_dim=128),
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "hidden_act": "silu",
        "use_sliding_window": False,
    }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="qwen3", translate=translate, layer_tensors=_LAYER_TENSORS)

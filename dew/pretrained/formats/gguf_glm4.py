"""GGUF files of the `glm4` architecture: GLM-4 (0414), dense, whose gate and up projections are one tensor."""

from typing import Any

from dew.pretrained.formats.architecture import DECODER_LAYER_TENSORS, GgufArchitecture, GgufFields, decoder_fields

_LAYER_TENSORS = {
    **{name: stem for name, stem in DECODER_LAYER_TENSORS.items() if name != "ffn_gate"},
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `Glm4Config`."""
    config = {
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        **decoder_fields(fields, partial=True),
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "hidden_act": "silu",
    }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="glm4", translate=translate, layer_tensors=_LAYER_TENSORS)

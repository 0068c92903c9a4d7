"""GGUF files of the `olmo2` architecture: norms after each part, and over all queries and keys."""

from typing import Any

from dew.pretrained.formats.architecture import DECODER_LAYER_TENSORS, GgufArchitecture, GgufFields, decoder_fields

_LAYER_TENSORS = {
    **{name: stem for name, stem in DECODER_LAYER_TENSORS.items() if name not in ("attn_norm", "ffn_norm")},
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to an `Olmo2Config`."""
    shared = decoder_fields(fields)
    shared.pop("head_dim")
    fields.finish()
    return {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], **shared, "hidden_act": "silu"}


ARCHITECTURE = GgufArchitecture(name="olmo2", translate=translate, layer_tensors=_LAYER_TENSORS)

"""GGUF files of the `starcoder2` architecture. The format has no place for their window: all layers read everything."""

from typing import Any

from dew.pretrained.formats.architecture import DECODER_LAYER_TENSORS, GgufArchitecture, GgufFields, decoder_fields

_LAYER_TENSORS = {
    **{name: stem for name, stem in DECODER_LAYER_TENSORS.items() if name != "ffn_gate"},
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `Starcoder2Config`."""
    config = {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        **decoder_fields(fields, layer_norm="norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": None,
    }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="starcoder2", translate=translate, layer_tensors=_LAYER_TENSORS)

"""GGUF files of the `gemma3` architecture, the text models: five layers with a window, then one without."""

from typing import Any

from dew.pretrained.formats.architecture import GgufArchitecture, GgufFields, decoder_fields, layer_kinds
from dew.pretrained.formats.gguf_gemma import SHIFTED
from dew.pretrained.formats.gguf_gemma2 import LAYER_TENSORS, query_scalar

_LAYER_TENSORS = {**LAYER_TENSORS, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
PERIOD = 6
LARGEST_LAYERS = 62  # Gemma 3 27B


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `Gemma3TextConfig`."""
    shared = decoder_fields(fields, head_dim=256, theta=1e6)
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    config = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        **shared,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": layer_kinds(fields, shared["num_hidden_layers"], PERIOD),
        "query_pre_attn_scalar": query_scalar(shared, LARGEST_LAYERS),
        "rope_parameters": {"full_attention": shared["rope_parameters"], "sliding_attention": local},
    }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="gemma3", translate=translate, layer_tensors=_LAYER_TENSORS, shifted=SHIFTED)

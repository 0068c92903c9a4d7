"""GGUF files of the `gemma2` architecture. What the format leaves out, llama.cpp knows by the number of layers."""

from typing import Any

from dew.pretrained.formats.architecture import DECODER_LAYER_TENSORS, GgufArchitecture, GgufFields, decoder_fields
from dew.pretrained.formats.gguf_gemma import SHIFTED

LAYER_TENSORS = {
    **DECODER_LAYER_TENSORS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LARGEST_LAYERS = 46  # Gemma 2 27B


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `Gemma2Config`."""
    shared = decoder_fields(fields, head_dim=256)
    config = {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        **shared,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "sliding_window": fields.count("attention.sliding_window", 4096),
        "query_pre_attn_scalar": query_scalar(shared, LARGEST_LAYERS),
    }
    fields.finish()
    return config


def query_scalar(config: dict[str, Any], largest_layers: int) -> int:
    """Give the number whose inverse root multiplies the attention logits.

    Args:
        config: The shared fields.
        largest_layers: Layers of the one size whose number is not the width of a head.
    """
    is_largest = config["num_hidden_layers"] == largest_layers
    return config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]


ARCHITECTURE = GgufArchitecture(name="gemma2", translate=translate, layer_tensors=LAYER_TENSORS, shifted=SHIFTED)

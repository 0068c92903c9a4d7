"""GGUF files of the `gpt2` architecture. They hold the projections transposed: [out, in], as other models do."""

from typing import Any

from dew.pretrained.formats.architecture import GgufArchitecture, GgufFields, plain_fields

_TENSORS = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `GPT2Config`."""
    shared = plain_fields(fields)
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": shared["num_hidden_layers"],
        "n_positions": shared["max_position_embeddings"],
        "n_embd": shared["hidden_size"],
        "n_inner": shared["intermediate_size"],
        "n_head": shared["num_attention_heads"],
        "vocab_size": shared["vocab_size"],
        "tie_word_embeddings": shared["tie_word_embeddings"],
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # the metadata say nothing of training
    }
    # Every head has keys of its own.
    fields.finish({"attention.head_count_kv": (shared["num_attention_heads"],)})
    return config


ARCHITECTURE = GgufArchitecture(
    name="gpt2",
    translate=translate,
    tensors=_TENSORS,
    layer_tensors=_LAYER_TENSORS,
    layer_prefix="transformer.h.{i}.",
    transposed=("*.c_attn.weight", "*.c_proj.weight", "*.c_fc.weight"),
)

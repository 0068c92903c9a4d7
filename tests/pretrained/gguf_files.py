"""Writes small GGUF files from a Hugging Face checkpoint of Llama's shape, as llama.cpp's converter does."""

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def stored_name(name):
    """GGUF name of a Hugging Face tensor."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[stem]}.{suffix}"


def permuted(values, heads):
    """The converter's own formula for query and key rows."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def write(path, config, tensors, quantised=None, fields=None, architecture="llama"):
    """Write a GGUF file.

    Args:
        path: Where.
        config: Fields of a LlamaConfig.
        tensors: Hugging Face name to float32 array.
        quantised: Type of the matrices whose width is whole blocks; None keeps float32.
        fields: Further fields of the architecture; None removes one.
        architecture: Only Llama's rows of queries and keys are permuted.
    """
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
        **(fields or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_float32(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = permuted(tensor, config["num_attention_heads"])
        elif architecture == "llama" and ".k_proj." in name:
            tensor = permuted(tensor, config["num_key_value_heads"])
        if quantised is None or tensor.ndim < 2 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[quantised][0]:
            writer.add_tensor(stored_name(name), tensor)
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(tensor), quantised)
            writer.add_tensor(stored_name(name), packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

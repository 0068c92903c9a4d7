"""Writes small GGUF files from a Hugging Face checkpoint of Llama's shape, as llama.cpp's converter does."""

import gguf
import numpy as np

# Architectures whose query and key rows the converter permutes, and those whose scales it stores plus one.
PERMUTED, SHIFTED = ("llama", "granite", "smollm3"), ("gemma", "gemma2", "gemma3")
KINDS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def stored_name(name, architecture="llama"):
    """GGUF name of a Hugging Face tensor, by the package's own table; a name that is not in it stays."""
    return gguf.get_tensor_name_map(KINDS[architecture], 16).get_name(name, (".weight", ".bias")) or name


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
        architecture: As `general.architecture` says.
    """
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"].get("rope_theta"),
        "rope.dimension_count": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
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
        if architecture in PERMUTED and ".q_proj." in name:
            tensor = permuted(tensor, config["num_attention_heads"])
        elif architecture in PERMUTED and ".k_proj." in name:
            tensor = permuted(tensor, config["num_key_value_heads"])
        elif architecture in SHIFTED and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        if quantised is None or tensor.ndim < 2 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[quantised][0]:
            writer.add_tensor(stored_name(name, architecture), tensor)
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(tensor), quantised)
            writer.add_tensor(stored_name(name, architecture), packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""Writes small GGUF files from a Hugging Face checkpoint of Llama's shape, as llama.cpp's converter does."""

import gguf
import numpy as np

# Architectures whose query and key rows the converter permutes, and those whose scales it stores plus one.
PERMUTED, SHIFTED = ("llama", "granite", "smollm3"), ("gemma", "gemma2", "gemma3")
# What the converter turns: GPT-2 keeps these [in, out].
TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
# Field of the metadata, and the fields of configs that it is written from.
SIZES = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "vocab_size": ("vocab_size",),
}
KINDS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def stored_name(name, architecture="llama"):
    """GGUF name of a Hugging Face tensor, by the package's own table; a name that is not in it stays."""
    return gguf.get_tensor_name_map(KINDS[architecture], 16).get_name(name, (".weight", ".bias")) or name


def permuted(values, heads):
    """The converter's own formula for query and key rows."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def by_kind(values, heads):
    """The converter's own formula for the fused projection of GPT-NeoX: queries, then keys, then values."""
    apart = values.reshape(heads, 3, values.shape[0] // heads // 3, *values.shape[1:])
    return np.concatenate([apart[:, kind].reshape(-1, *values.shape[1:]) for kind in range(3)])


def as_converted(name, tensor, config, architecture):
    """What the converter makes of a tensor."""
    if architecture in PERMUTED and ".q_proj." in name:
        return permuted(tensor, config["num_attention_heads"])
    if architecture in PERMUTED and ".k_proj." in name:
        return permuted(tensor, config["num_key_value_heads"])
    if architecture in SHIFTED and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    if architecture == "gpt2" and name.endswith(TURNED):
        return np.ascontiguousarray(tensor.T)
    if architecture == "gptneox" and ".query_key_value." in name:
        return by_kind(tensor, config["num_attention_heads"])
    return tensor


def metadata(config):
    """Fields of the architecture that the converter writes for every decoder."""
    values = {key: next((config[name] for name in names if name in config), None) for key, names in SIZES.items()}
    rotary = config.get("rope_parameters")
    if rotary is not None:
        full = rotary.get("full_attention", rotary)
        width = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        values["rope.freq_base"] = full.get("rope_theta")
        values["rope.dimension_count"] = int(width * full.get("partial_rotary_factor", 1))
    return values


def write(path, config, tensors, quantised=None, fields=None, architecture="llama"):
    """Write a GGUF file.

    Args:
        path: Where.
        config: Fields of a Hugging Face config.
        tensors: Hugging Face name to float32 array.
        quantised: Type of the matrices whose width is whole blocks; None keeps float32.
        fields: Further fields of the architecture; None removes one.
        architecture: As `general.architecture` says.
    """
    values = {**metadata(config), **(fields or {})}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_float32(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        tensor = as_converted(name, tensor, config, architecture)
        if quantised is None or tensor.ndim < 2 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[quantised][0]:
            writer.add_tensor(stored_name(name, architecture), tensor)
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(tensor), quantised)
            writer.add_tensor(stored_name(name, architecture), packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

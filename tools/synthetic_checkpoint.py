"""Write checkpoints of real shapes and made-up values, for measurements: `write_safetensors`, `write_gguf`.

Tensors of a sparse checkpoint have their sizes and names, take no room on the disk, and read as zeros.
"""

import json
import math
import struct

# ggml type of each tensor of a mixed GGUF file, by the last word of its name; float32 where nothing is said.
GGUF_TYPES = {
    "embed_tokens": "F16",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "Q8_0"),
    **dict.fromkeys(("gate_proj", "up_proj"), "Q4_K"),
    "down_proj": "Q6_K",
}
# Where a block of a type holds its 16-bit scales; random bytes there would be infinities.
SCALE_BYTES = {"Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
CHUNK_BYTES = 2**24


def llama_config(num_layers, **fields):
    """Config of a Llama of 1.5 GB in 12 layers of bfloat16; fields replace its own."""
    return {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": num_layers,
        "vocab_size": 32_000,
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_theta": 1e5,
        **fields,
    }


def mixtral_config(num_layers, **fields):
    """Config of a Mixtral with 107 MB of bfloat16 a layer, 101 MB of them experts; fields replace its own."""
    return {
        "model_type": "mixtral",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": num_layers,
        "vocab_size": 32_000,
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_theta": 1e5,
        **fields,
    }


def gemma2_27b_config(**fields):
    """Config of Gemma 2 27B, 54 GB in bfloat16; fields replace its own."""
    return {
        "model_type": "gemma2",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "num_hidden_layers": 46,
        "vocab_size": 256_000,
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 144,
        "sliding_window": 4096,
        **fields,
    }


def tensor_shapes(config):
    """Name and shape of every tensor of a Llama, a Mixtral or a Gemma 2 with tied embeddings, layer by layer."""
    width, hidden, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, pairs = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    layer = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (pairs, width),
        "self_attn.v_proj": (pairs, width),
        "self_attn.o_proj": (width, queries),
        **_perceptron_shapes(config, width, hidden),
        **dict.fromkeys(norms, (width,)),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _perceptron_shapes(config, width, hidden):
    """Name and shape of the matrices behind the attention of a layer."""
    if config["model_type"] != "mixtral":
        return {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden)}
    shapes = {"block_sparse_moe.gate": (config["num_local_experts"], width)}
    for expert in range(config["num_local_experts"]):
        name = f"block_sparse_moe.experts.{expert}"
        shapes |= {f"{name}.w1": (hidden, width), f"{name}.w2": (width, hidden), f"{name}.w3": (hidden, width)}
    return shapes


def num_layers_of(config, nbytes, itemsize):
    """How many layers make a model of about this size."""
    none, one = (
        sum(map(math.prod, tensor_shapes({**config, "num_hidden_layers": count}).values())) * itemsize
        for count in (0, 1)
    )
    return max(1, round((nbytes - none) / (one - none)))


def write_safetensors(directory, config, *, max_shard_bytes=None, sparse=False):
    """Write config.json and bfloat16 weights, in shards with an index when a largest shard is given.

    Args:
        directory: An empty folder.
        config: As `llama_config` or `gemma2_27b_config` returns.
        max_shard_bytes: Most bytes of tensors in a file; None writes one file.
        sparse: Whether the values are holes in the files.
    """
    (directory / "config.json").write_text(json.dumps(config))
    shards = [[]]
    for name, shape in tensor_shapes(config).items():
        held = sum(2 * math.prod(each) for _, each in shards[-1])
        if max_shard_bytes is not None and shards[-1] and held + 2 * math.prod(shape) > max_shard_bytes:
            shards.append([])
        shards[-1].append((name, shape))
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file_name = (
            "model.safetensors" if max_shard_bytes is None else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        weight_map |= {name: file_name for name, _ in tensors}
        _write_shard(directory / file_name, tensors, sparse)
    if max_shard_bytes is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _write_shard(path, tensors, sparse):
    header, offset = {}, 0
    for name, shape in tensors:
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if sparse:
            file.truncate(8 + len(text) + offset)
        else:
            _repeat(file, _bfloat16_weights(), offset)


def write_gguf(path, config):
    """Write a Llama as a GGUF file whose tensors have the types of `GGUF_TYPES`."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    written = []
    for name, shape in tensor_shapes(config).items():
        kind = gguf.GGMLQuantizationType[GGUF_TYPES.get(name.split(".")[-2], "F32")]
        size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = (*shape[:-1], shape[-1] // size * block_bytes)
        stored = names.get_name(name, (".weight",))
        writer.add_tensor_info(stored, rows, np.dtype(np.uint8), math.prod(rows), raw_dtype=kind)
        written.append((kind, math.prod(rows)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file = writer.fout[0]
    file.write(bytes(-file.tell() % writer.data_alignment))
    values = {kind: _blocks(kind, gguf.GGML_QUANT_SIZES[kind][1]) for kind, _ in written}
    for kind, nbytes in written:
        _repeat(file, values[kind], nbytes)
        file.write(bytes(-file.tell() % writer.data_alignment))
    writer.close()


def _blocks(kind, block_bytes):
    """A few megabytes of a ggml type: ordinary weights, or random blocks with small scales."""
    import numpy as np

    if kind.name in ("F32", "F16"):
        dtype = np.float32 if kind.name == "F32" else np.float16
        return (np.random.default_rng(0).standard_normal(CHUNK_BYTES // 4, np.float32) * 0.02).astype(dtype).tobytes()
    blocks = np.random.default_rng(0).integers(0, 256, (CHUNK_BYTES // block_bytes, block_bytes), np.uint8)
    for start in SCALE_BYTES[kind.name]:
        blocks[:, start : start + 2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    return blocks.tobytes()


def _bfloat16_weights():
    import ml_dtypes
    import numpy as np

    values = np.random.default_rng(0).standard_normal(CHUNK_BYTES, np.float32) * 0.02
    return values.astype(ml_dtypes.bfloat16).tobytes()


def _repeat(file, values, nbytes):
    for begin in range(0, nbytes, len(values)):
        file.write(values[: min(len(values), nbytes - begin)])

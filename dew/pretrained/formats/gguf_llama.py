"""GGUF files of the `llama` architecture: metadata to a Hugging Face config, names, and the order of rotary rows.

llama.cpp rotates neighbouring rows (2j, 2j+1) of a head, Hugging Face rotates (j, j + H/2). Its converter permutes the
rows of the query and key projections accordingly; `row_order` undoes it.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from dew.pretrained.source import CheckpointError

MODEL_TYPE = "llama"
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Fields read below; any other `llama.*` field may change the computation and is refused by name.
_READ = {
    *_REQUIRED,
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "vocab_size",
}
# Fields that change nothing at this value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.original_context_length": (0,),
    "rope.scaling.finetuned": (False,),
}


def config(metadata: dict[str, Any], tensors: Iterable[str], where: object) -> dict[str, Any]:
    """Translate GGUF metadata to the fields of a Hugging Face `LlamaConfig`.

    Args:
        metadata: Key-value pairs of the file.
        tensors: GGUF names of the tensors; without `output.weight` the head is tied.
        where: The file, for errors.

    Raises:
        CheckpointError: If a field is missing, of the wrong type, or changes the computation in a way that is not read.
    """
    fields = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    unknown = [key for key, value in fields.items() if key not in _READ and value not in _NEUTRAL.get(key, ())]
    if unknown:
        listed = ", ".join(f"llama.{key}={fields[key]!r}" for key in unknown)
        raise CheckpointError(f"{where}: these fields may change the computation and are not supported: {listed}")
    missing = [key for key in (*_REQUIRED, "attention.layer_norm_rms_epsilon") if key not in fields]
    if missing:
        raise CheckpointError(f"{where}: the metadata lacks {', '.join(f'llama.{key}' for key in missing)}.")
    result: dict[str, Any] = {name: _count(fields, key, where) for key, name in _REQUIRED.items()}
    heads, width = result["num_attention_heads"], result["hidden_size"]
    head_dim = _count(fields, "rope.dimension_count", where, width // heads)
    for key in ("attention.key_length", "attention.value_length"):
        if _count(fields, key, where, head_dim) != head_dim:
            raise CheckpointError(
                f"{where}: llama.{key}={fields[key]} differs from the {head_dim} rotated dimensions of a head; heads "
                "that rotate in part are not supported."
            )
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    names = set(tensors)
    result |= {
        "model_type": MODEL_TYPE,
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": _count(fields, "attention.head_count_kv", where, heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(fields["attention.layer_norm_rms_epsilon"], where),
        "rope_parameters": _rope(fields, where),
        "vocab_size": _count(fields, "vocab_size", where, len(tokens) or None),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "hidden_act": "silu",
    }
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            result[name] = value
    return result


def tensor_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; a name that is not known comes back unchanged."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TENSORS:
        return f"{_TENSORS[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER_TENSORS:
        return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.{suffix}"
    return name


def row_order(name: str, num_rows: int, config: dict[str, Any]) -> np.ndarray | None:
    """Stored row that holds each Hugging Face row of a query or key projection; None for any other tensor.

    Args:
        name: Hugging Face name.
        num_rows: Rows of the tensor.
        config: What `config` returned.
    """
    if not re.search(r"self_attn\.[qk]_proj\.", name):
        return None
    half = config["head_dim"] // 2
    if half < 1 or num_rows % (2 * half):
        raise CheckpointError(f"Tensor {name!r} has {num_rows} rows, which are not whole heads of {2 * half}.")
    # Hugging Face row (head, side, pair) is stored at (head, pair, side).
    return np.arange(num_rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)


def _rope(fields: dict[str, Any], where: object) -> dict[str, Any]:
    theta = _decimal(fields.get("rope.freq_base", 10000.0), where)
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {
            "rope_type": "linear",
            "rope_theta": theta,
            "factor": _decimal(fields.get("rope.scaling.factor"), where),
        }
    raise CheckpointError(f"{where}: llama.rope.scaling.type={kind!r} is not supported; known: none, linear.")


def _count(fields: dict[str, Any], key: str, where: object, default: int | None = None) -> int:
    value = fields.get(key, default)
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"{where}: llama.{key} must be a positive whole number. Received: {value!r}")
    return value


def _decimal(value: Any, where: object) -> float:
    """The decimal that was meant: metadata holds float32, where 1e-05 reads as 9.999999747378752e-06."""
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"{where}: expected a positive number. Received: {value!r}")
    return float(str(np.float32(value)))

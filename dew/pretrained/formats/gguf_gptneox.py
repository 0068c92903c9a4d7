"""GGUF files of the `gptneox` architecture: GPT-NeoX and Pythia, with all queries before all keys and values."""

from typing import Any

import numpy as np

from dew.pretrained.formats.architecture import GgufArchitecture, GgufFields, decoder_fields
from dew.pretrained.source import CheckpointError

_TENSORS = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `GPTNeoXConfig`, whose default activation is taken: the format names none."""
    shared = decoder_fields(fields, partial=True, layer_norm="layer_norm_eps")
    head_dim, pairs = shared.pop("head_dim"), shared.pop("num_key_value_heads")
    heads, width = shared["num_attention_heads"], shared["hidden_size"]
    if pairs != heads or head_dim * heads != width:
        raise CheckpointError(
            f"{fields.where}: {pairs} key/value heads and {heads} query heads of {head_dim} on a width of {width} are "
            "none that a GPT-NeoX config can express."
        )
    parallel = fields.get("use_parallel_residual", True)
    if type(parallel) is not bool:
        raise CheckpointError(
            f"{fields.where}: gptneox.use_parallel_residual must be true or false. Received: {parallel!r}"
        )
    config = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        **shared,
        "attention_bias": fields.has_tensor("blk.0.attn_qkv.bias"),
        "hidden_act": "gelu",
        "use_parallel_residual": parallel,
    }
    fields.finish()
    return config


def by_head(name: str, num_rows: int, config: dict[str, Any]) -> np.ndarray | None:
    """Stored row of each row of the fused projection, which Hugging Face keeps head by head; None for others."""
    if ".query_key_value." not in name:
        return None
    heads = config["num_attention_heads"]
    if num_rows % (3 * heads):
        raise CheckpointError(f"Tensor {name!r} has {num_rows} rows, which are not three for each of {heads} heads.")
    return np.arange(num_rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)


ARCHITECTURE = GgufArchitecture(
    name="gptneox",
    translate=translate,
    tensors=_TENSORS,
    layer_tensors=_LAYER_TENSORS,
    layer_prefix="gpt_neox.layers.{i}.",
    row_order=by_head,
)

"""Qwen3-MoE: Qwen3 with experts in its layers, or in some of them."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer
from dew.nn.norm import NormSpec
from dew.nn.router import RouterSpec
from dew.pretrained.families.decoder import arguments_of, attention_of, block_config, divided_head_dim, model_config
from dew.pretrained.families.experts import (
    experts_config,
    experts_of,
    has_experts,
    router_config,
    router_training_of,
    sparse_layers_config,
)
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.qwen2_moe import QWEN_EXPERT_WEIGHTS, dense_config, sparse_layers
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.source import CheckpointError


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Qwen3MoeConfig`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    max_length = fields.count("max_position_embeddings", 32768)
    bias = fields.flag("attention_bias", False)
    window = fields.optional_count("sliding_window", 4096)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        default_key_value_heads=4 if "num_key_value_heads" not in fields.config else None,
        bias=bias,
        out_bias=bias,
        qk_norm=norm,
        window=window if fields.flag("use_sliding_window", False) else None,
        rotary=read_rotary(fields, max_length),
    )
    router = RouterSpec(top_k=fields.count("num_experts_per_tok", 8), normalise=fields.flag("norm_topk_prob", False))
    # The class of transformers 5 writes the name that others have; published configs say num_experts.
    count = "num_experts" if "num_experts" in fields.config else "num_local_experts"
    if fields.get("num_local_experts", None) not in (None, fields.get(count, None)):
        raise CheckpointError(f"{fields.where}: num_experts and num_local_experts disagree.")
    experts = experts_of(fields, count=count, width="moe_intermediate_size", router=router)
    layers = sparse_layers(fields, attention, experts, norm)
    training = router_training_of(fields, router.top_k if any(map(has_experts, layers)) else 0)
    arguments = arguments_of(fields, layers, norm, max_length, router_training=training)
    fields.get("max_window_layers", None)  # published beside a window that is not in use, and not read by the class
    fields.finish()
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Qwen3MoeConfig`."""
    if any(layer.attention.qk_norm != layer.norm for layer in module.layers):
        raise ValueError("a Qwen3-MoE config states one norm for the layers and for queries and keys")
    blocks = block_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "attention_bias": layer.attention.bias,
            "use_sliding_window": layer.attention.window is not None,
            "sliding_window": layer.attention.window,
        },
    )
    experts = experts_config(
        module,
        lambda spec: {"norm_topk_prob": spec.router.normalise},
        count="num_local_experts",
        width="moe_intermediate_size",
    )
    parts = (blocks, experts, dense_config(module), sparse_layers_config(module), router_config(module))
    return {**model_config(module), **{name: value for part in parts for name, value in part.items()}}


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=(*QWEN_EXPERT_WEIGHTS, *DECODER_WEIGHTS),
    ignorable=IGNORABLE,
)

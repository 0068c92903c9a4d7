"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, and experts chosen by softmax scores, in groups or among all."""

import dataclasses
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer
from dew.pretrained.families.deepseek_v3 import (
    EXPERT_WEIGHTS,
    EXPERTS,
    NEUTRAL,
    deepseek_arguments,
    deepseek_config,
    routed_experts_of,
)
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.latent import LATENT_WEIGHTS, latent_attention_of
from dew.pretrained.families.rotary import read_rotary
from dew.pretrained.recipe import Weight

SHARED_BIASES = tuple(
    Weight(f"params/layers_{{i}}/mlp/shared/{name}/bias", f"{EXPERTS}.shared_experts.{name}.bias", f"{dim} -> {dim}")
    for name, dim in (("gate_proj", "F"), ("up_proj", "F"), ("down_proj", "D"))
)


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `DeepseekV2Config`."""
    max_length = fields.count("max_position_embeddings", 2048)
    # The reference turns neighbours as complex numbers, in float32 from angles that are not rounded.
    rotary = dataclasses.replace(read_rotary(fields, max_length), interleaved=True, in_float32=True, round_tables=False)
    in_groups = fields.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    groups = {"groups": fields.count("n_group", 1), "top_groups": fields.count("topk_group", 1)}
    experts = routed_experts_of(
        fields,
        default_shared=2,
        default_scale=1.0,
        bias=fields.flag("mlp_bias", False),
        top_k=fields.count("num_experts_per_tok"),
        **(groups if in_groups else {}),
    )
    attention = latent_attention_of(fields, rotary, default_heads=32)
    arguments = deepseek_arguments(fields, max_length, attention, experts, default_dense=0)
    # The reference's class reads no `norm_topk_prob`; the published code divides by the sum where it is true.
    fields.finish({**NEUTRAL, "norm_topk_prob": (False, None), "scoring_func": ("softmax",)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `DeepseekV2Config`."""
    config = deepseek_config(module)
    method = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    shared = module.expert_layers[0].shared
    return {**config, "topk_method": method, "mlp_bias": shared is not None and shared.bias}


FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=(*SHARED_BIASES, *EXPERT_WEIGHTS, *LATENT_WEIGHTS, *DECODER_WEIGHTS),
    ignorable=IGNORABLE,
)

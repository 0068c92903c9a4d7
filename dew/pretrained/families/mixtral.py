"""Mixtral: Mistral with experts in every layer."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.nn.router import RouterSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    block_config,
    divided_head_dim,
    model_config,
)
from dew.pretrained.families.experts import (
    expert_weights,
    experts_config,
    experts_of,
    router_config,
    router_training_of,
)
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `MixtralConfig`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-5))
    max_length = fields.count("max_position_embeddings", 4096 * 32)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        default_key_value_heads=8 if "num_key_value_heads" not in fields.config else None,
        window=fields.optional_count("sliding_window", None),
        rotary=read_rotary(fields, max_length, default_theta=1e6),
    )
    router = RouterSpec(top_k=fields.count("num_experts_per_tok", 2), normalise=True)
    experts = experts_of(fields, count="num_local_experts", width="intermediate_size", router=router)
    layers = (LayerSpec(mixer=attention, mlp=experts, norm=norm),) * fields.count("num_hidden_layers")
    training = router_training_of(fields, router.top_k)
    arguments = arguments_of(fields, layers, norm, max_length, router_training=training)
    fields.finish({"router_jitter_noise": (0, 0.0)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `MixtralConfig`."""
    blocks = block_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "sliding_window": layer.attention.window,
        },
    )
    experts = experts_config(module, lambda spec: {}, count="num_local_experts", width="intermediate_size")
    return {**model_config(module), **blocks, **experts, **router_config(module)}


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=(*expert_weights("model.layers.{i}.block_sparse_moe", "w1", "w3", "w2"), *DECODER_WEIGHTS),
    ignorable=IGNORABLE,
)

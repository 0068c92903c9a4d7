"""Qwen3.5-MoE, the text models: Qwen3.5 with experts and a gated perceptron beside them in every layer."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer
from dew.pretrained.families.experts import experts_config, router_config, router_training_of
from dew.pretrained.families.family import IGNORABLE, Family, decoder_weights_but
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.gated_delta import hybrid_config
from dew.pretrained.families.qwen2_moe import shared_width
from dew.pretrained.families.qwen3_5 import MIXER_WEIGHTS, PREDICTION, VISION, further_config, hybrid_arguments
from dew.pretrained.families.qwen3_next import SPARSE_WEIGHTS, gated_experts_of
from dew.pretrained.fused_experts import split_experts


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Qwen3_5MoeTextConfig`."""
    experts = gated_experts_of(fields, 8, normalise=True)
    training = router_training_of(fields, experts.router.top_k)
    return hybrid_arguments(fields, experts, default_key_value_heads=2, router_training=training)


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Qwen3_5MoeTextConfig`."""
    experts = experts_config(
        module,
        lambda spec: {"shared_expert_intermediate_size": shared_width(spec)},
        count="num_experts",
        width="moe_intermediate_size",
    )
    return {**hybrid_config(module), **experts, **router_config(module), **further_config(module)}


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=decoder_weights_but(*MIXER_WEIGHTS, *SPARSE_WEIGHTS),
    ignorable=IGNORABLE,
    unpacked=split_experts,
    left_out=lambda config: VISION,
    prediction=PREDICTION,
)

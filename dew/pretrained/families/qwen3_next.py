"""Qwen3-Next: gated delta nets and every fourth layer gated attention, with experts and a gated perceptron in each."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec
from dew.pretrained.families.decoder import ACTIVATIONS, arguments_of
from dew.pretrained.families.experts import (
    experts_config,
    experts_of,
    router_config,
    router_training_of,
    shared_weights,
    sparse_layers_config,
)
from dew.pretrained.families.family import IGNORABLE, Family, decoder_weights_but
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.gated_delta import (
    DELTA,
    DELTA_WEIGHTS,
    GATED_ATTENTION_WEIGHTS,
    NEUTRAL,
    STORED,
    gated_attention_of,
    hybrid_config,
    norm_of,
    with_delta_nets,
)
from dew.pretrained.families.prediction import prediction_of, qwen_prediction
from dew.pretrained.families.qwen2_moe import EXPERTS, QWEN_EXPERT_WEIGHTS, dense_config, shared_config, sparse_layers
from dew.pretrained.fused_experts import split_experts
from dew.pretrained.recipe import fused_weights

PREDICTION = qwen_prediction("num_nextn_predict_layers")
SPARSE_WEIGHTS = (*QWEN_EXPERT_WEIGHTS, *shared_weights(EXPERTS, "shared_expert", "shared_expert_gate"))
# Each key's query, key, values and gates are neighbours in one projection, what drives its state in another.
GROUPED_WEIGHTS = (
    *fused_weights(
        f"{STORED}.linear_attn.in_proj_qkvz.weight",
        (f"{DELTA}/q_proj/kernel", "(G P) D -> D G P", "P"),
        (f"{DELTA}/k_proj/kernel", "(G P) D -> D G P", "P"),
        (f"{DELTA}/v_proj/kernel", "(G RH) D -> D G RH", "RH"),
        (f"{DELTA}/gate_proj/kernel", "(G RH) D -> D G RH", "RH"),
    ),
    *fused_weights(
        f"{STORED}.linear_attn.in_proj_ba.weight",
        (f"{DELTA}/beta_proj/kernel", "(G R) D -> D G R", "R"),
        (f"{DELTA}/decay_proj/kernel", "(G R) D -> D G R", "R"),
    ),
)


def gated_experts_of(fields: Fields, top_k: int, *, normalise: bool) -> ExpertsSpec:
    """Read experts with a gated perceptron beside them.

    Args:
        fields: The config.
        top_k: Experts of a token in a config that does not say.
        normalise: Whether the weights of a token's experts are divided by their sum.
    """
    shared = MlpSpec(
        features=fields.count("shared_expert_intermediate_size", 512),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    router = RouterSpec(top_k=fields.count("num_experts_per_tok", top_k), normalise=normalise)
    return experts_of(
        fields, count="num_experts", width="moe_intermediate_size", router=router, shared=shared, shared_gate=True
    )


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Qwen3NextConfig`."""
    norm, max_length = norm_of(fields), fields.count("max_position_embeddings", 32768)
    attention = gated_attention_of(fields, max_length, default_key_value_heads=2)
    experts = gated_experts_of(fields, 10, normalise=fields.flag("norm_topk_prob", True))
    layers = with_delta_nets(fields, sparse_layers(fields, attention, experts, norm))
    training = router_training_of(fields, experts.router.top_k)
    arguments = arguments_of(fields, layers, norm, max_length, router_training=training)
    arguments |= prediction_of(
        fields, PREDICTION.field, LayerSpec(mixer=attention, mlp=experts, norm=norm), is_shared=True
    )
    fields.finish(NEUTRAL)
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Qwen3NextConfig`."""
    experts = experts_config(module, shared_config, count="num_experts", width="moe_intermediate_size")
    further = {PREDICTION.field: module.prediction.depth} if module.prediction else {}
    parts = (experts, dense_config(module), sparse_layers_config(module), router_config(module), further)
    return {**hybrid_config(module), **{name: value for part in parts for name, value in part.items()}}


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=decoder_weights_but(*GATED_ATTENTION_WEIGHTS, *DELTA_WEIGHTS, *GROUPED_WEIGHTS, *SPARSE_WEIGHTS),
    ignorable=IGNORABLE,
    unpacked=split_experts,
    prediction=PREDICTION,
)

"""DeepSeek-V3 and R1: latent attention, and experts chosen in groups by sigmoid scores with a bias for balance.

What DeepSeek-V2 shares is here too. Published checkpoints add a layer that predicts the token after the next one
(https://arxiv.org/abs/2412.19437, section 2.2), behind the last layer and with experts as that one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.latent_attention import LatentAttentionSpec
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.norm import NormSpec
from dew.nn.router import RouterSpec
from dew.pretrained.families.decoder import arguments_of, mlp_of, model_config
from dew.pretrained.families.experts import expert_weights, experts_config, experts_of, has_experts, shared_weights
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family, uniform
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.latent import LATENT_WEIGHTS, latent_attention_of, latent_config
from dew.pretrained.families.prediction import DEEPSEEK_PREDICTION, prediction_depth, prediction_of
from dew.pretrained.families.rotary import read_rotary
from dew.pretrained.recipe import Weight
from dew.pretrained.source import CheckpointError

EXPERTS = "model.layers.{i}.mlp"
EXPERT_WEIGHTS = (
    *expert_weights(EXPERTS, "gate_proj", "up_proj", "down_proj"),
    *shared_weights(EXPERTS, "shared_experts"),
)
TRAINED_WITH = ("aux_loss_alpha", "ep_size", "output_router_logits", "seq_aux")
"""Fields about how a model was trained or served; the reference's classes read none of them."""
NEUTRAL = {"moe_layer_freq": (1,)}


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `DeepseekV3Config`."""
    max_length = fields.count("max_position_embeddings", 4096)
    # Null says no, an absent field says yes.
    is_interleaved = fields.flag("rope_interleave", "rope_interleave" not in fields.config)
    rotary = dataclasses.replace(read_rotary(fields, max_length), interleaved=is_interleaved)
    experts = routed_experts_of(
        fields,
        default_shared=1,
        default_scale=2.5,
        top_k=fields.count("num_experts_per_tok", 8),
        score="sigmoid",
        normalise=fields.flag("norm_topk_prob", "norm_topk_prob" not in fields.config),
        groups=fields.count("n_group", 8),
        top_groups=fields.count("topk_group", 4),
        group_score="top2",
        balance_bias=True,
    )
    attention = latent_attention_of(fields, rotary, default_heads=128)
    arguments = deepseek_arguments(fields, max_length, attention, experts, default_dense=3)
    block = dataclasses.replace(arguments["layers"][-1], mlp=experts)
    arguments |= prediction_of(fields, DEEPSEEK_PREDICTION.field, block)
    fields.finish({**NEUTRAL, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)})
    return arguments


def routed_experts_of(
    fields: Fields, *, default_shared: int, default_scale: float, bias: bool = False, **router: Any
) -> ExpertsSpec:
    """Read the experts, and the perceptron beside them that is as wide as several of them.

    Args:
        fields: The config.
        default_shared: How many, in a config that does not say so.
        default_scale: Factor on the weights of the chosen, likewise.
        bias: Whether that perceptron has biases.
        **router: Further fields of the router.

    Raises:
        CheckpointError: If the router cannot choose so.
    """
    scale = fields.number("routed_scaling_factor", default_scale)
    try:
        spec = RouterSpec(scale=scale, **router)
    except ValueError as error:
        raise CheckpointError(f"{fields.where}: {error}") from None
    width = fields.count("moe_intermediate_size") * fields.count("n_shared_experts", default_shared)
    shared = MlpSpec(features=width, activation=mlp_of(fields).activation, bias=bias)
    return experts_of(fields, count="n_routed_experts", width="moe_intermediate_size", router=spec, shared=shared)


def deepseek_arguments(
    fields: Fields, max_length: int, attention: LatentAttentionSpec, experts: ExpertsSpec, *, default_dense: int
) -> dict[str, Any]:
    """Build the layers, the first few with a perceptron in place of experts, and what is outside them.

    Args:
        fields: The config.
        max_length: Longest context in tokens.
        attention: Attention of every layer.
        experts: Experts of those that have them.
        default_dense: Layers without, in a config that does not say so.

    Returns:
        Arguments of `CausalTransformer`.
    """
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    assert experts.shared is not None, "every layer of experts has a shared perceptron"
    dense = mlp_of(fields, bias=experts.shared.bias)
    first = fields.count("first_k_dense_replace", default_dense, least=0)
    layers = tuple(
        LayerSpec(mixer=attention, mlp=dense if index < first else experts, norm=norm)
        for index in range(fields.count("num_hidden_layers"))
    )
    for name in TRAINED_WITH:
        fields.get(name, None)
    return arguments_of(fields, layers, norm, max_length)


def deepseek_config(module: CausalTransformer) -> dict[str, Any]:
    """Write what both config classes state.

    Raises:
        ValueError: If layers with perceptrons are not the first ones, or these are not alike.
    """
    sparse = [has_experts(layer) for layer in module.layers]
    if sparse != sorted(sparse):
        raise ValueError("the config has perceptrons in the first layers and experts in all after them")
    experts = experts_config(module, _routed_config, count="n_routed_experts", width="moe_intermediate_size")
    dense = [layer.mlp for layer in module.layers if isinstance(layer.mlp, MlpSpec)]
    like = module.expert_layers[0].shared
    if any(like is None or spec != dataclasses.replace(like, features=spec.features) for spec in dense):
        raise ValueError("the config has perceptrons with the activation and biases of the shared one")
    widths = uniform({"intermediate_size": [spec.features for spec in dense]}) if dense else {}
    first = {"first_k_dense_replace": len(dense)}
    # A width that no layer has is asked for all the same.
    return {**model_config(module), "intermediate_size": module.features, **latent_config(module), **experts} | (
        widths | first
    )


def _routed_config(spec: ExpertsSpec) -> Mapping[str, Any]:
    if spec.shared is None or spec.shared.features % spec.features:
        raise ValueError(
            "the config has a shared perceptron as wide as several experts. Received: "
            f"shared={spec.shared}, features={spec.features}"
        )
    return {
        "n_shared_experts": spec.shared.features // spec.features,
        "routed_scaling_factor": spec.router.scale,
        "n_group": spec.router.groups,
        "topk_group": spec.router.top_groups,
        "norm_topk_prob": spec.router.normalise,
    }


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `DeepseekV3Config`."""
    config = deepseek_config(module)
    interleaved = uniform({"rope_interleave": [_is_interleaved(layer) for layer in module.layers]})
    return {**config, **interleaved, DEEPSEEK_PREDICTION.field: prediction_depth(module)}


def _is_interleaved(layer: LayerSpec) -> bool:
    assert isinstance(layer.mixer, LatentAttentionSpec), "the attention is written already"
    return layer.mixer.rotary.interleaved


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=(
        Weight("params/layers_{i}/mlp/router/balance_bias", f"{EXPERTS}.gate.e_score_correction_bias", "E -> E"),
        *EXPERT_WEIGHTS,
        *LATENT_WEIGHTS,
        *DECODER_WEIGHTS,
    ),
    ignorable=IGNORABLE,
    prediction=DEEPSEEK_PREDICTION,
)

"""Granite 4: Mamba-2 and attention in any order, Granite's factors, rotary positions or none; dense or with experts.

A layer with experts adds a perceptron that every token reads, which is all that a dense layer has.
"""

import dataclasses
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import EmbeddingSpec, HeadSpec
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.norm import NormSpec
from dew.nn.router import RouterSpec, RouterTraining
from dew.pretrained.families.decoder import ACTIVATIONS, arguments_of, attention_of, dense_mlp, divided_head_dim
from dew.pretrained.families.experts import experts_of, has_experts, router_config, router_training_of
from dew.pretrained.families.family import IGNORABLE, Family, decoder_weights_but
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.granite import factors_config
from dew.pretrained.families.granitemoe import GRANITE_EXPERT_WEIGHTS
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.families.scanning import (
    HYBRID_FIELDS,
    hybrid_config,
    perceptron_config,
    read_scan,
    scan_weights,
    scans,
)
from dew.pretrained.recipe import Weight, fused_weights
from dew.pretrained.source import CheckpointError

FIELDS = dataclasses.replace(HYBRID_FIELDS, eps=("rms_norm_eps", 1e-6))
ATTENDS = {"linear_attention": False, "mamba": False, "full_attention": True, "attention": True}
"""What `layer_types` calls a layer, and whether it attends."""
INERT = ("init_method", "mamba_chunk_size")
"""How weights start, and how many tokens kernels compute at once."""
OF_EXPERTS = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "intermediate_size")
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `GraniteMoeHybridConfig`."""
    norm, max_length = NormSpec(eps=fields.number("rms_norm_eps", 1e-6)), fields.count("max_position_embeddings", 2048)
    bias = fields.flag("attention_bias", False)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        bias=bias,
        out_bias=bias,
        scale=fields.number("attention_multiplier", 1.0),
        rotary=read_rotary(fields, max_length) if _rotates(fields) else None,
    )
    mlp, training = _perceptron(fields)
    shared: dict[str, Any] = {"mlp": mlp, "norm": norm, "residual_scale": fields.number("residual_multiplier", 1.0)}
    kinds = _kinds(fields, fields.count("num_hidden_layers"))
    scan = attention if all(kinds) else read_scan(fields, FIELDS)
    layers = tuple(LayerSpec(mixer=attention if attends else scan, **shared) for attends in kinds)
    embedding = EmbeddingSpec(scale=fields.number("embedding_multiplier", 1.0))
    head = HeadSpec(scale=1.0 / fields.number("logits_scaling", 1.0))
    more: dict[str, Any] = {"embedding": embedding, "head": head, "router_training": training}
    arguments = arguments_of(fields, layers, norm, max_length, **more)
    for name in fields.config if all(kinds) else ():
        if name.startswith("mamba_") or name == "time_step_limit":
            fields.get(name, None)  # of layers that the model does not have
    for name in INERT:
        fields.get(name, None)
    fields.finish({"normalization_function": ("rmsnorm",), "mlp_bias": (False,)})
    return arguments


def _perceptron(fields: Fields) -> tuple[MlpSpec | ExpertsSpec, RouterTraining]:
    """Read what follows the mixers, and what trains its routers."""
    activation = fields.choice("hidden_act", ACTIVATIONS, "silu")
    shared = MlpSpec(features=fields.count("shared_intermediate_size", 1024), activation=activation)
    if not fields.count("num_local_experts", 8, least=0):
        for name in OF_EXPERTS:
            fields.get(name, None)
        return shared, RouterTraining()
    router = RouterSpec(top_k=fields.count("num_experts_per_tok", 2), score="softmax_of_chosen")
    names = {"count": "num_local_experts", "width": "intermediate_size"}
    experts = experts_of(fields, **names, default_count=8, router=router, shared=shared)
    return experts, router_training_of(fields, router.top_k)


def _rotates(fields: Fields) -> bool:
    """Read whether the attention has rotary positions."""
    kind = fields.get("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise CheckpointError(
            f"{fields.where}: position_embedding_type must be 'rope', 'nope' or null. "
            f"Received: position_embedding_type={kind!r}"
        )
    if kind == "nope":
        for name in ROTARY:
            fields.get(name, None)
    return kind == "rope"


def _kinds(fields: Fields, count: int) -> list[bool]:
    """Read whether each layer attends."""
    stated = fields.get("layer_types", fields.get("layers_block_type", ["linear_attention"] * count))
    if not isinstance(stated, list) or len(stated) != count or not set(stated) <= set(ATTENDS):
        raise CheckpointError(
            f"{fields.where}: layer_types must say {', '.join(ATTENDS)} for each of {count} layers. "
            f"Received: layer_types={str(stated)[:200]}"
        )
    return [ATTENDS[kind] for kind in stated]


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `GraniteMoeHybridConfig`."""
    if len(set(map(has_experts, module.layers))) > 1:
        raise ValueError("the config has experts in every layer or in none")

    def attention(layer: LayerSpec) -> dict[str, Any]:
        spec = layer.attention
        if spec.head_dim * spec.num_heads != module.features:
            raise ValueError("a Granite config takes the width of a head from that of the model")
        rotary = {} if spec.rotary is None else {"rope_parameters": write_rotary(spec.rotary, module.max_length)}
        return {
            "attention_multiplier": spec.logit_scale,
            "position_embedding_type": None if spec.rotary is None else "rope",
            **rotary,
        }

    def every(layer: LayerSpec) -> dict[str, Any]:
        return {"residual_multiplier": layer.residual_scale, **_perceptron_config(layer)}

    return {
        **hybrid_config(module, FIELDS, attention, every),
        "layer_types": ["linear_attention" if scans(layer) else "full_attention" for layer in module.layers],
        **(router_config(module) if module.expert_layers else {}),
        **factors_config(module),
    }


def _perceptron_config(layer: LayerSpec) -> dict[str, Any]:
    """Write what follows a mixer."""
    if not has_experts(layer):
        return {**perceptron_config(dense_mlp(layer), "shared_intermediate_size"), "num_local_experts": 0}
    spec = layer.experts
    if spec.shared is None:
        raise ValueError("the config has a shared perceptron beside the experts")
    return {
        **perceptron_config(spec.shared, "shared_intermediate_size"),
        "num_local_experts": spec.num_experts,
        "intermediate_size": spec.features,
        "num_experts_per_tok": spec.router.top_k,
    }


def _mlp_weights(mlp: str) -> tuple[Weight, ...]:
    """Name the perceptron that every token reads: the block's own, or the one beside its experts."""
    path, stored = f"params/layers_{{i}}/{mlp}", "model.layers.{i}.shared_mlp"
    return (
        *fused_weights(
            f"{stored}.input_linear.weight",
            (f"{path}/gate_proj/kernel", "F D -> D F", "F"),
            (f"{path}/up_proj/kernel", "F D -> D F", "F"),
        ),
        Weight(f"{path}/down_proj/kernel", f"{stored}.output_linear.weight", "D F -> F D"),
    )


FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=decoder_weights_but(
        *_mlp_weights("mlp"),
        *_mlp_weights("mlp/shared"),
        *GRANITE_EXPERT_WEIGHTS,
        *scan_weights("model.layers.{i}.mamba"),
    ),
    ignorable=IGNORABLE,
)

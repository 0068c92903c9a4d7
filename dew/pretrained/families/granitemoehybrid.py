"""Granite 4, dense: Mamba-2 and attention in any order, Granite's factors, rotary positions or none at all.

Its mixtures of experts are refused by name.
"""

import dataclasses
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import EmbeddingSpec, HeadSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import (
    ACTIVATIONS,
    arguments_of,
    attention_of,
    dense_mlp,
    divided_head_dim,
    model_config,
)
from dew.pretrained.families.family import IGNORABLE, Family, decoder_weights_but
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.families.scanning import (
    HYBRID_FIELDS,
    UNATTENDED,
    UNSCANNED,
    read_scan,
    scan_weights,
    uniform_over,
    write_scan,
)
from dew.pretrained.recipe import Weight, fused_weights
from dew.pretrained.source import CheckpointError

FIELDS = dataclasses.replace(HYBRID_FIELDS, eps=("rms_norm_eps", 1e-6))
ATTENDS = {"linear_attention": False, "mamba": False, "full_attention": True, "attention": True}
"""What `layer_types` calls a layer, and whether it attends."""
MLP, STORED = "params/layers_{i}/mlp", "model.layers.{i}.shared_mlp"
# They are about experts, how weights start, and how many tokens kernels compute at once.
INERT = (
    *("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "intermediate_size"),
    *("init_method", "mamba_chunk_size"),
)
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `GraniteMoeHybridConfig`."""
    experts = fields.count("num_local_experts", 8, least=0)
    if experts:
        raise CheckpointError(
            f"{fields.where}: Granite hybrids with experts are not supported yet, only num_local_experts=0. "
            f"Received: num_local_experts={experts}"
        )
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
    activation = fields.choice("hidden_act", ACTIVATIONS, "silu")
    mlp = MlpSpec(features=fields.count("shared_intermediate_size", 1024), activation=activation)
    shared: dict[str, Any] = {"mlp": mlp, "norm": norm, "residual_scale": fields.number("residual_multiplier", 1.0)}
    kinds = _kinds(fields, fields.count("num_hidden_layers"))
    scan = attention if all(kinds) else read_scan(fields, FIELDS)
    layers = tuple(LayerSpec(mixer=attention if attends else scan, **shared) for attends in kinds)
    embedding = EmbeddingSpec(scale=fields.number("embedding_multiplier", 1.0))
    head = HeadSpec(scale=1.0 / fields.number("logits_scaling", 1.0))
    arguments = arguments_of(fields, layers, norm, max_length, embedding=embedding, head=head)
    for name in fields.config if all(kinds) else ():
        if name.startswith("mamba_") or name == "time_step_limit":
            fields.get(name, None)  # of layers that the model does not have
    for name in INERT:
        fields.get(name, None)
    fields.finish({"normalization_function": ("rmsnorm",), "mlp_bias": (False,)})
    return arguments


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
    scanning = [layer for layer in module.layers if isinstance(layer.mixer, Mamba2Spec)]
    attending = [layer for layer in module.layers if layer not in scanning]
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}

    def shared(layer: LayerSpec) -> dict[str, Any]:
        mlp = dense_mlp(layer)
        return {
            "rms_norm_eps": layer.norm.eps,
            "shared_intermediate_size": mlp.features,
            "hidden_act": activations[mlp.activation],
            "residual_multiplier": layer.residual_scale,
        }

    def attention(layer: LayerSpec) -> dict[str, Any]:
        spec = layer.attention
        if spec.head_dim * spec.num_heads != module.features:
            raise ValueError("a Granite config takes the width of a head from that of the model")
        rotary = {} if spec.rotary is None else {"rope_parameters": write_rotary(spec.rotary, module.max_length)}
        return {
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "attention_bias": spec.bias,
            "attention_multiplier": spec.logit_scale,
            "position_embedding_type": None if spec.rotary is None else "rope",
            **rotary,
        }

    def scan(layer: LayerSpec) -> dict[str, Any]:
        assert isinstance(layer.mixer, Mamba2Spec), "chosen above"
        return write_scan(layer.mixer, module.features, FIELDS)

    return {
        **model_config(module),
        **(uniform_over(scanning, scan) or UNSCANNED),
        **(uniform_over(attending, attention) or UNATTENDED),
        **uniform_over(module.layers, shared),
        "layer_types": ["linear_attention" if layer in scanning else "full_attention" for layer in module.layers],
        "num_local_experts": 0,
        "embedding_multiplier": module.embedding.scale,
        # Fifteen digits undo the rounding of one over the divisor.
        "logits_scaling": float(f"{1.0 / module.head.scale:.15g}"),
    }


FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=decoder_weights_but(
        *fused_weights(
            f"{STORED}.input_linear.weight",
            (f"{MLP}/gate_proj/kernel", "F D -> D F", "F"),
            (f"{MLP}/up_proj/kernel", "F D -> D F", "F"),
        ),
        Weight(f"{MLP}/down_proj/kernel", f"{STORED}.output_linear.weight", "D F -> F D"),
        *scan_weights("model.layers.{i}.mamba"),
    ),
    ignorable=IGNORABLE,
)

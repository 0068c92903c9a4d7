"""Granite 3 with experts: Granite's factors; a layer's experts are two tensors, one holds gate and up projections."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import EmbeddingSpec, HeadSpec
from dew.nn.norm import NormSpec
from dew.nn.router import RouterSpec
from dew.pretrained.families.decoder import arguments_of, attention_of, block_config, implied_head_dim, model_config
from dew.pretrained.families.experts import experts_config, experts_of, router_config, router_training_of
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.granite import factors_config
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.recipe import Weight, fused_weights


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `GraniteMoeConfig`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    max_length = fields.count("max_position_embeddings", 2048)
    bias = fields.flag("attention_bias", False)
    attention = attention_of(
        fields,
        head_dim=implied_head_dim(fields),
        bias=bias,
        out_bias=bias,
        scale=fields.number("attention_multiplier", 1.0),
        rotary=read_rotary(fields, max_length),
    )
    router = RouterSpec(top_k=fields.count("num_experts_per_tok", 2), score="softmax_of_chosen")
    layer = LayerSpec(
        mixer=attention,
        mlp=experts_of(fields, count="num_local_experts", width="intermediate_size", router=router),
        norm=norm,
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    arguments = arguments_of(
        fields,
        (layer,) * fields.count("num_hidden_layers"),
        norm,
        max_length,
        embedding=EmbeddingSpec(scale=fields.number("embedding_multiplier", 1.0)),
        head=HeadSpec(scale=1.0 / fields.number("logits_scaling", 1.0)),
        router_training=router_training_of(fields, router.top_k),
    )
    fields.finish()
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `GraniteMoeConfig`."""
    blocks = block_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "attention_bias": layer.attention.bias,
            "attention_multiplier": layer.attention.logit_scale,
            "residual_multiplier": layer.residual_scale,
        },
    )
    if blocks.pop("head_dim") * blocks["num_attention_heads"] != module.features:
        raise ValueError("a Granite config takes the width of a head from that of the model")
    experts = experts_config(module, lambda spec: {}, count="num_local_experts", width="intermediate_size")
    return {**model_config(module), **blocks, **experts, **router_config(module), **factors_config(module)}


_BLOCK, _PATH = "model.layers.{i}.block_sparse_moe", "params/layers_{i}/mlp"
GRANITE_EXPERT_WEIGHTS = (
    Weight(f"{_PATH}/router/kernel", f"{_BLOCK}.router.layer.weight", "E D -> D E"),
    *fused_weights(
        f"{_BLOCK}.input_linear.weight",
        (f"{_PATH}/experts/gate_proj", "E F D -> E D F", "F"),
        (f"{_PATH}/experts/up_proj", "E F D -> E D F", "F"),
    ),
    Weight(f"{_PATH}/experts/down_proj", f"{_BLOCK}.output_linear.weight", "E D F -> E F D"),
)
FAMILY = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=(*GRANITE_EXPERT_WEIGHTS, *DECODER_WEIGHTS),
    ignorable=IGNORABLE,
)

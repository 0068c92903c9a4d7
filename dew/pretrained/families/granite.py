"""Granite 3, dense: Llama with factors on embeddings, on what blocks add and on attention, and a divisor of logits."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import EmbeddingSpec, HeadSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    dense_mlp,
    divided_head_dim,
    layer_config,
    mlp_of,
    model_config,
)
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields, positive
from dew.pretrained.families.rotary import read_rotary, write_rotary


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `GraniteConfig`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    max_length = fields.count("max_position_embeddings", 2048)
    bias = fields.flag("attention_bias", False)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        bias=bias,
        out_bias=bias,
        scale=fields.number("attention_multiplier", 1.0),
        rotary=read_rotary(fields, max_length),
    )
    layer = LayerSpec(
        mixer=attention,
        mlp=mlp_of(fields, bias=fields.flag("mlp_bias", False)),
        norm=norm,
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    layers = (layer,) * fields.count("num_hidden_layers")
    embedding = EmbeddingSpec(scale=fields.number("embedding_multiplier", 1.0))
    head = HeadSpec(scale=positive(1.0 / fields.number("logits_scaling", 1.0), "1 / logits_scaling", fields.where))
    arguments = arguments_of(fields, layers, norm, max_length, embedding=embedding, head=head)
    fields.finish()
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `GraniteConfig`."""
    config = layer_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "attention_bias": layer.attention.bias,
            "attention_multiplier": layer.attention.logit_scale,
            "mlp_bias": dense_mlp(layer).bias,
            "residual_multiplier": layer.residual_scale,
        },
    )
    if config.pop("head_dim") * config["num_attention_heads"] != module.features:
        raise ValueError("a Granite config takes the width of a head from that of the model")
    return {**model_config(module), **config, **factors_config(module)}


def factors_config(module: CausalTransformer) -> dict[str, Any]:
    """Write the factors outside the blocks."""
    # Fifteen digits undo the rounding of one over the divisor.
    divisor = float(f"{1.0 / module.head.scale:.15g}")
    return {"embedding_multiplier": module.embedding.scale, "logits_scaling": divisor}


FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

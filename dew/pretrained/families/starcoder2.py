"""StarCoder2: Llama with layer norms, biases, a plain gelu perceptron, and a window on every layer."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    divided_head_dim,
    layer_config,
    mlp_of,
    model_config,
)
from dew.pretrained.families.family import IGNORABLE, Family, decoder_weights_but, linear
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary

WEIGHTS = decoder_weights_but(
    *linear("params/layers_{i}/mlp/up_proj", "model.layers.{i}.mlp.c_fc", "F D -> D F"),
    *linear("params/layers_{i}/mlp/down_proj", "model.layers.{i}.mlp.c_proj", "D F -> F D"),
)
DROPOUT = {"dropout_rate": "residual_dropout", "embedding_dropout_rate": "embedding_dropout"}
"""Rates beside that of attention, ours to the config's."""


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Starcoder2Config`."""
    norm = NormSpec(kind="layer", eps=fields.number("norm_epsilon", 1e-5), bias=True, cast="after_scale")
    max_length = fields.count("max_position_embeddings", 4096)
    bias = fields.flag("use_bias", True)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        default_key_value_heads=2,
        bias=bias,
        out_bias=bias,
        window=fields.optional_count("sliding_window", None),
        rotary=read_rotary(fields, max_length),
    )
    mlp = mlp_of(fields, default="gelu_pytorch_tanh", gated=False, bias=bias)
    layers = (LayerSpec(mixer=attention, mlp=mlp, norm=norm),) * fields.count("num_hidden_layers")
    rates = {ours: fields.rate(theirs) for ours, theirs in DROPOUT.items()}
    arguments = arguments_of(fields, layers, norm, max_length, tied=True, **rates)
    fields.finish({"norm_type": ("layer_norm",), "mlp_type": ("default",)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Starcoder2Config`."""
    config = layer_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "sliding_window": layer.attention.window,
            "use_bias": layer.attention.bias,
        },
        eps="norm_epsilon",
    )
    if config["head_dim"] * config["num_attention_heads"] == module.features:
        config.pop("head_dim")  # no field of the config class, which reads it only where it differs
    rates = {theirs: getattr(module, ours) for ours, theirs in DROPOUT.items()}
    return {**model_config(module), **config, **rates}


FAMILY = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=WEIGHTS,
    ignorable=IGNORABLE,
)

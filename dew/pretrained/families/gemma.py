"""Gemma 1: Llama with scales stored as scale - 1, a gelu, and embeddings multiplied by the root of their width."""

from typing import Any

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import EmbeddingSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import arguments_of, attention_of, layer_config, mlp_of, model_config
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary

# Early releases say "gelu" and mean the tanh form, which is what they were trained with.
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}


NEUTRAL: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False, None)}
"""Fields of every Gemma with the values that change nothing."""


def norm_of(fields: Fields) -> NormSpec:
    """Read the norm of every Gemma: scale and product in float32, one rounding at the end."""
    return NormSpec(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0, cast="after_scale")


def embedding_of(fields: Fields) -> EmbeddingSpec:
    """Give the factor on the embeddings of every Gemma, which is rounded to the compute dtype first."""
    return EmbeddingSpec(scale=fields.count("hidden_size") ** 0.5, round_scale=True)


def heads_of(fields: Fields, **options: Any) -> AttentionSpec:
    """Read the heads of every Gemma.

    Args:
        fields: The config.
        **options: Further arguments of `attention_of`.
    """
    bias = fields.flag("attention_bias", False)
    return attention_of(fields, head_dim=fields.count("head_dim", 256), bias=bias, out_bias=bias, **options)


def tied_arguments(fields: Fields, layers: tuple[LayerSpec, ...], **more: Any) -> dict[str, Any]:
    """Read what is outside the blocks of every Gemma.

    Args:
        fields: The config.
        layers: The blocks.
        **more: Further arguments of `CausalTransformer`.
    """
    return arguments_of(fields, layers, tied=True, embedding=embedding_of(fields), **more)


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `GemmaConfig`."""
    norm, max_length = norm_of(fields), fields.count("max_position_embeddings", 8192)
    attention = heads_of(fields, default_key_value_heads=16, rotary=read_rotary(fields, max_length))
    mlp = mlp_of(fields, default="gelu_pytorch_tanh", choices=ACTIVATIONS)
    layers = (LayerSpec(mixer=attention, mlp=mlp, norm=norm),) * fields.count("num_hidden_layers")
    arguments = tied_arguments(fields, layers, norm=norm, max_length=max_length)
    fields.finish({**NEUTRAL, "hidden_activation": (None, "gelu_pytorch_tanh")})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `GemmaConfig`."""
    config = layer_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "attention_bias": layer.attention.bias,
        },
    )
    return {**model_config(module), **config}


FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

"""Llama 2, 3, 3.1 and the models that use its config: SmolLM and others with `model_type: llama`."""

from typing import Any

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family, uniform
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.source import CheckpointError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `LlamaConfig`."""
    heads, width = fields.count("num_attention_heads"), fields.count("hidden_size")
    if fields.config.get("head_dim") is None and width % heads:
        raise CheckpointError(f"{fields.where}: hidden_size={width} is not a multiple of num_attention_heads={heads}.")
    kwargs = decoder(fields, head_dim=fields.count("head_dim", width // heads), qk_norm=False)
    fields.finish({"layer_types": (["full_attention"] * len(kwargs["layers"]),)})
    return kwargs


def decoder(fields: Fields, *, head_dim: int, qk_norm: bool) -> dict[str, Any]:
    """Translate the fields that Llama and its descendants share.

    Args:
        fields: The config.
        head_dim: Width of a head.
        qk_norm: Whether queries and keys are normalised per head.

    Returns:
        Arguments of `CausalTransformer`.

    Raises:
        CheckpointError: If a field is missing or has a value that is not supported.
    """
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    max_length = fields.count("max_position_embeddings", 2048)
    heads = fields.count("num_attention_heads")
    key_value_heads = fields.count("num_key_value_heads", heads)
    if heads % key_value_heads or head_dim % 2:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads must be a multiple of num_key_value_heads and head_dim even. "
            f"Received: num_attention_heads={heads}, num_key_value_heads={key_value_heads}, head_dim={head_dim}"
        )
    bias = fields.flag("attention_bias", False)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=key_value_heads,
        head_dim=head_dim,
        bias=bias,
        out_bias=bias,
        qk_norm=norm if qk_norm else None,
        rotary=read_rotary(fields, max_length),
    )
    mlp = MlpSpec(
        features=fields.count("intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        bias=fields.flag("mlp_bias", False),
    )
    layer = LayerSpec(attention=attention, mlp=mlp, norm=norm)
    return {
        "vocab_size": fields.count("vocab_size"),
        "features": fields.count("hidden_size"),
        "layers": (layer,) * fields.count("num_hidden_layers"),
        "norm": norm,
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "max_length": max_length,
    }


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `LlamaConfig`."""
    if any(layer.attention.qk_norm is not None for layer in module.layers):
        raise ValueError("a Llama config cannot express norms of queries and keys")
    return decoder_config(module)


def decoder_config(module: CausalTransformer) -> dict[str, Any]:
    """Write the fields that Llama and its descendants share.

    Raises:
        ValueError: If the layers differ, or one has no rotary positions.
    """
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    per_layer = [
        {
            "intermediate_size": layer.mlp.features,
            "num_attention_heads": layer.attention.num_heads,
            "num_key_value_heads": layer.attention.num_kv_heads,
            "head_dim": layer.attention.head_dim,
            "hidden_act": names[layer.mlp.activation],
            "rms_norm_eps": layer.norm.eps,
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "attention_bias": layer.attention.bias,
            "mlp_bias": layer.mlp.bias,
        }
        for layer in module.layers
    ]
    return {
        "vocab_size": module.vocab_size,
        "hidden_size": module.features,
        "num_hidden_layers": len(module.layers),
        "max_position_embeddings": module.max_length,
        "tie_word_embeddings": module.tie_embeddings,
        **uniform({name: [layer[name] for layer in per_layer] for name in per_layer[0]}),
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

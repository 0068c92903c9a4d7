"""Qwen3, the dense models: Llama with a norm of every query and key head and a head width of its own."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.llama import decoder, decoder_config
from dew.pretrained.source import CheckpointError


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Qwen3Config`."""
    if fields.flag("use_sliding_window", False):
        raise CheckpointError(f"{fields.where}: use_sliding_window=true is not supported.")
    for name in ("sliding_window", "max_window_layers"):
        fields.get(name, None)  # without effect while use_sliding_window is false
    # The config class has its own default: a Qwen3 head is 128 wide whatever the width of the model.
    kwargs = decoder(fields, head_dim=fields.count("head_dim", 128), qk_norm=True)
    if "num_key_value_heads" not in fields.config:
        raise CheckpointError(f"{fields.where}: the config lacks 'num_key_value_heads'.")
    fields.finish({"layer_types": (["full_attention"] * len(kwargs["layers"]),)})
    return kwargs


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Qwen3Config`."""
    if any(layer.attention.qk_norm != layer.norm for layer in module.layers):
        raise ValueError("a Qwen3 config states one norm for the layers and for queries and keys")
    config = decoder_config(module)
    if config.pop("mlp_bias"):
        raise ValueError("a Qwen3 config cannot express biases in the mlp")
    return {**config, "use_sliding_window": False}


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=DECODER_WEIGHTS,
    ignorable=IGNORABLE,
)

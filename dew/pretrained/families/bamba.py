"""Bamba: Mamba-2 layers with a perceptron each, and a few layers of attention that rotate half of every head."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import arguments_of, attention_of, dense_mlp, divided_head_dim, mlp_of
from dew.pretrained.families.family import IGNORABLE, Family, decoder_weights_but, linear
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.families.scanning import (
    HYBRID_FIELDS,
    hybrid_config,
    perceptron_config,
    read_scan,
    scan_weights,
    scans,
)
from dew.pretrained.recipe import Weight
from dew.pretrained.source import CheckpointError

FRACTION = 0.5
"""Rotated part of a head where the rotary parameters state none; a field beside them is without effect."""
BLOCK, STORED = "params/layers_{i}", "model.layers.{i}"


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `BambaConfig`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-5))
    max_length = fields.count("max_position_embeddings", 262144)
    if fields.get("partial_rotary_factor", FRACTION) != FRACTION:
        raise CheckpointError(
            f"{fields.where}: a Bamba model takes partial_rotary_factor from rope_parameters alone. "
            f"Received: partial_rotary_factor={fields.get('partial_rotary_factor')!r} beside them"
        )
    bias, head_dim = fields.flag("attention_bias", False), divided_head_dim(fields)
    rotary = read_rotary(fields, max_length, default_fraction=FRACTION, partial=True)
    attention = attention_of(
        fields, head_dim=head_dim, default_key_value_heads=8, bias=bias, out_bias=bias, rotary=rotary
    )
    mlp = mlp_of(fields, bias=fields.flag("mlp_bias", False))
    scan = LayerSpec(mixer=read_scan(fields, HYBRID_FIELDS), mlp=mlp, norm=norm)
    count = fields.count("num_hidden_layers")
    attending = _attending(fields, count)
    layers = tuple(
        LayerSpec(mixer=attention, mlp=mlp, norm=norm) if index in attending else scan for index in range(count)
    )
    arguments = arguments_of(fields, layers, norm, max_length)
    for name in ("num_logits_to_keep", "mamba_chunk_size"):
        fields.get(name, None)
    fields.finish({"attn_rotary_emb": (rotary.width(head_dim),), "z_loss_coefficient": (0, 0.0, None)})
    return arguments


def _attending(fields: Fields, count: int) -> set[int]:
    """Read which layers attend."""
    indices = fields.get("attn_layer_indices", [])
    if not isinstance(indices, list) or any(type(each) is not int or not 0 <= each < count for each in indices):
        raise CheckpointError(
            f"{fields.where}: attn_layer_indices must list numbers of the {count} layers. "
            f"Received: attn_layer_indices={str(indices)[:200]}"
        )
    return set(indices)


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `BambaConfig`."""

    def attention(layer: LayerSpec) -> dict[str, Any]:
        return {"rope_parameters": write_rotary(layer.attention.rotary, module.max_length, partial=True)}

    def every(layer: LayerSpec) -> dict[str, Any]:
        mlp = dense_mlp(layer)
        return {**perceptron_config(mlp, "intermediate_size"), "mlp_bias": mlp.bias}

    attending = [index for index, layer in enumerate(module.layers) if not scans(layer)]
    return {**hybrid_config(module, HYBRID_FIELDS, attention, every), "attn_layer_indices": attending}


FAMILY = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=decoder_weights_but(
        Weight("params/norm/scale", "model.final_layernorm.weight", "D -> D"),
        Weight(f"{BLOCK}/post_attention_layernorm/scale", f"{STORED}.pre_ff_layernorm.weight", "D -> D"),
        *linear(f"{BLOCK}/mlp/gate_proj", f"{STORED}.feed_forward.gate_proj", "F D -> D F"),
        *linear(f"{BLOCK}/mlp/up_proj", f"{STORED}.feed_forward.up_proj", "F D -> D F"),
        *linear(f"{BLOCK}/mlp/down_proj", f"{STORED}.feed_forward.down_proj", "D F -> F D"),
        *scan_weights(f"{STORED}.mamba"),
    ),
    ignorable=IGNORABLE,
)

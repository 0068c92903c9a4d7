"""What the families with gated delta nets share: gated attention, the mixers' weights and config fields, both ways.

Entry points: `gated_attention_of`, `with_delta_nets`, `hybrid_config`; `DELTA_WEIGHTS` and `GATED_ATTENTION_WEIGHTS`
name what all of them store alike. Norms of the residual stream, of queries and of keys are stored as scale - 1.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import ACTIVATIONS, attention_of, model_config
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.families.scanning import UNATTENDED, uniform_over
from dew.pretrained.recipe import Weight, fused_weights
from dew.pretrained.source import CheckpointError

ATTENTION, DELTA = "params/layers_{i}/self_attn", "params/layers_{i}/linear_attn"
STORED = "model.layers.{i}"
FRACTION = 0.25
"""Rotated part of a head where the config states none."""
KINDS = {"linear_attention": False, "full_attention": True}
"""What `layer_types` calls a layer, and whether it attends."""
SIZES = {
    "linear_num_value_heads": ("num_heads", 32),
    "linear_value_head_dim": ("head_dim", 128),
    "linear_num_key_heads": ("num_keys", 16),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_conv_kernel_dim": ("conv_kernel", 4),
}
"""Fields of a delta net, ours and their defaults."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "use_sliding_window": (False,),
}
"""What published configs state beside the fields of the classes, at the values that the classes compute with."""

# The query and the gate of a head are neighbours in one projection.
GATED_ATTENTION_WEIGHTS = (
    *fused_weights(
        f"{STORED}.self_attn.q_proj.weight",
        *((f"{ATTENTION}/{name}/kernel", "(N H) D -> D N H", "H") for name in ("q_proj", "gate_proj")),
    ),
    *fused_weights(
        f"{STORED}.self_attn.q_proj.bias",
        *((f"{ATTENTION}/{name}/bias", "(N H) -> N H", "H") for name in ("q_proj", "gate_proj")),
    ),
)
# G keys, the R heads of each, which are RH wide together.
DELTA_WEIGHTS = (
    *fused_weights(
        f"{STORED}.linear_attn.conv1d.weight",
        (f"{DELTA}/q_conv/kernel", "(G P) 1 W -> G P W", "G"),
        (f"{DELTA}/k_conv/kernel", "(G P) 1 W -> G P W", "G"),
        (f"{DELTA}/v_conv/kernel", "(G RH) 1 W -> G RH W", "G"),
    ),
    Weight(f"{DELTA}/A_log", f"{STORED}.linear_attn.A_log", "(G R) -> G R"),
    Weight(f"{DELTA}/dt_bias", f"{STORED}.linear_attn.dt_bias", "(G R) -> G R"),
    Weight(f"{DELTA}/norm/scale", f"{STORED}.linear_attn.norm.weight", "H -> H"),
    Weight(f"{DELTA}/out_proj/kernel", f"{STORED}.linear_attn.out_proj.weight", "D (G RH) -> G RH D"),
)


def norm_of(fields: Fields) -> NormSpec:
    """Read the norm: scale and product in float32, one rounding at the end."""
    return NormSpec(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0, cast="after_scale")


def gated_attention_of(
    fields: Fields, max_length: int, default_key_value_heads: int, inert_rotary: Collection[str] = ()
) -> AttentionSpec:
    """Read the attention of the blocks that have it.

    Args:
        fields: The config.
        max_length: Longest context in tokens.
        default_key_value_heads: Key/value heads that the config class has of its own.
        inert_rotary: Rotary parameters that change nothing in the family.
    """
    bias = fields.flag("attention_bias", False)
    return attention_of(
        fields,
        head_dim=fields.count("head_dim", 256),
        default_key_value_heads=default_key_value_heads,
        bias=bias,
        out_bias=bias,
        gate=True,
        qk_norm=norm_of(fields),
        rotary=read_rotary(fields, max_length, default_fraction=FRACTION, partial=True, inert=inert_rotary),
    )


def with_delta_nets(fields: Fields, blocks: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Read which blocks attend, and give the others a delta net.

    Args:
        fields: The config.
        blocks: The blocks, first to last, as if all of them attended.

    Raises:
        CheckpointError: If `layer_types` or a size means nothing.
    """
    attends, delta = _attends(fields, len(blocks)), _delta_of(fields)
    return tuple(
        block if each else dataclasses.replace(block, mixer=delta) for block, each in zip(blocks, attends, strict=True)
    )


def _attends(fields: Fields, count: int) -> list[bool]:
    """Read whether each layer attends: every fourth where the config states neither the kinds nor another period."""
    period = fields.count("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % period else "full_attention" for index in range(count)]
    stated = fields.get("layer_types", default)
    if not isinstance(stated, list) or len(stated) != count or any(each not in list(KINDS) for each in stated):
        raise CheckpointError(
            f"{fields.where}: layer_types must say {' or '.join(KINDS)} for each of {count} layers. "
            f"Received: layer_types={str(stated)[:200]}"
        )
    return [KINDS[kind] for kind in stated]


def _delta_of(fields: Fields) -> GatedDeltaNetSpec:
    sizes = {ours: fields.count(name, default) for name, (ours, default) in SIZES.items()}
    activation, eps = fields.choice("hidden_act", ACTIVATIONS, "silu"), norm_of(fields).eps
    try:
        return GatedDeltaNetSpec(**sizes, activation=activation, norm_eps=eps)
    except ValueError as error:
        raise CheckpointError(f"{fields.where}: {error}") from None


def hybrid_config(module: CausalTransformer) -> dict[str, Any]:
    """Write all but what is about perceptrons and experts; whether or not a layer attends.

    Raises:
        ValueError: If the config cannot express the layers.
    """
    deltas = [layer for layer in module.layers if isinstance(layer.mixer, GatedDeltaNetSpec)]
    attending = [layer for layer in module.layers if layer not in deltas]
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}

    def attention(layer: LayerSpec) -> Mapping[str, Any]:
        spec = layer.attention
        return {
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "attention_bias": spec.bias,
            "rope_parameters": write_rotary(spec.rotary, module.max_length, partial=True),
        }

    def delta(layer: LayerSpec) -> Mapping[str, Any]:
        assert isinstance(layer.mixer, GatedDeltaNetSpec), "chosen above"
        sizes = dataclasses.asdict(layer.mixer)
        return {name: sizes[ours] for name, (ours, _) in SIZES.items()} | {
            "hidden_act": activations[layer.mixer.activation]
        }

    return {
        **model_config(module),
        **(uniform_over(attending, attention) or UNATTENDED),
        **uniform_over(deltas, delta),
        **uniform_over(module.layers, lambda layer: {"rms_norm_eps": layer.norm.eps}),
        "layer_types": ["linear_attention" if layer in deltas else "full_attention" for layer in module.layers],
    }

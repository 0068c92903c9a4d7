"""Mamba-2: blocks of a norm and a scan, without attention and without perceptrons (https://arxiv.org/abs/2405.21060)."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import arguments_of, model_config
from dew.pretrained.families.family import Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.scanning import ScanFields, read_scan, scan_weights, uniform_over, write_scan
from dew.pretrained.recipe import Weight

FIELDS = ScanFields(
    heads=("num_heads", 128),
    head_dim=("head_dim", 64),
    groups=("n_groups", 8),
    state=("state_size", 128),
    kernel=("conv_kernel", 4),
    expand=("expand", 2),
    conv_bias=("use_conv_bias", True),
    bias=("use_bias", False),
    eps=("layer_norm_epsilon", 1e-5),
)
LONGEST = 2**20
"""Tokens of the longest context: the config names none, and the state has one size whatever the length is."""
# How weights start, and how many tokens kernels compute at once.
INERT = (
    *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
    *("rescale_prenorm_residual", "chunk_size"),
)


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Mamba2Config`."""
    norm = NormSpec(eps=fields.number("layer_norm_epsilon", 1e-5))
    wide = fields.flag("residual_in_fp32", True)
    layer = LayerSpec(mixer=read_scan(fields, FIELDS), mlp=None, norm=norm, residual_in_float32=wide)
    layers = (layer,) * fields.count("num_hidden_layers")
    arguments = arguments_of(fields, layers, norm, fields.count("max_position_embeddings", LONGEST))
    for name in INERT:
        fields.get(name, None)
    fields.finish({"norm_before_gate": (False,), "rms_norm": (True,)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Mamba2Config`."""

    def write(layer: LayerSpec) -> dict[str, Any]:
        if not isinstance(layer.mixer, Mamba2Spec) or layer.mlp is not None:
            raise ValueError("a Mamba-2 config has a scan alone in every layer")
        scan = write_scan(layer.mixer, module.features, FIELDS)
        return {**scan, "layer_norm_epsilon": layer.norm.eps, "residual_in_fp32": layer.residual_in_float32}

    config = {**model_config(module), **uniform_over(module.layers, write)}
    if module.max_length == LONGEST:
        del config["max_position_embeddings"]
    return config


FAMILY = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=(
        Weight("params/embed_tokens/embedding", "backbone.embeddings.weight", "V D -> V D"),
        Weight("params/norm/scale", "backbone.norm_f.weight", "D -> D"),
        Weight("params/lm_head/embedding", "lm_head.weight", "V D -> V D"),
        Weight("params/layers_{i}/input_layernorm/scale", "backbone.layers.{i}.norm.weight", "D -> D"),
        *scan_weights("backbone.layers.{i}.mixer"),
    ),
)

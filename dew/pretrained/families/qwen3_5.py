"""Qwen3.5, the dense text models: gated delta nets, every fourth layer gated attention, a perceptron in each."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.pretrained.families.decoder import arguments_of, dense_mlp, mlp_of
from dew.pretrained.families.family import IGNORABLE, Family, decoder_weights_but
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.gated_delta import (
    DELTA,
    DELTA_WEIGHTS,
    GATED_ATTENTION_WEIGHTS,
    NEUTRAL,
    STORED,
    gated_attention_of,
    hybrid_config,
    norm_of,
    with_delta_nets,
)
from dew.pretrained.families.prediction import LOAD_WITHOUT, prediction_of, qwen_prediction
from dew.pretrained.families.scanning import perceptron_config, uniform_over
from dew.pretrained.recipe import Weight, fused_weights
from dew.pretrained.source import CheckpointError

# Which pairs of dimensions turn by time, height and width of a place in an image; in a text all three are the token's.
IMAGE_PLACES = ("mrope_section", "mrope_interleaved")
PUBLISHED = NEUTRAL | {
    "mamba_ssm_dtype": ("float32",),  # what states are kept in here
    "mlp_only_layers": ([],),
    "norm_topk_prob": (True,),
}
PREDICTION = qwen_prediction("mtp_num_hidden_layers")
DEDICATED = "mtp_use_dedicated_embeddings"
VISION = {"model.visual.*": "layers that read images"}
"""What published checkpoints hold beside the text model."""
MIXER_WEIGHTS = (
    *GATED_ATTENTION_WEIGHTS,
    *DELTA_WEIGHTS,
    *fused_weights(
        f"{STORED}.linear_attn.in_proj_qkv.weight",
        (f"{DELTA}/q_proj/kernel", "(G P) D -> D G P", "G"),
        (f"{DELTA}/k_proj/kernel", "(G P) D -> D G P", "G"),
        (f"{DELTA}/v_proj/kernel", "(G RH) D -> D G RH", "G"),
    ),
    Weight(f"{DELTA}/gate_proj/kernel", f"{STORED}.linear_attn.in_proj_z.weight", "(G RH) D -> D G RH"),
    Weight(f"{DELTA}/beta_proj/kernel", f"{STORED}.linear_attn.in_proj_b.weight", "(G R) D -> D G R"),
    Weight(f"{DELTA}/decay_proj/kernel", f"{STORED}.linear_attn.in_proj_a.weight", "(G R) D -> D G R"),
)


def hybrid_arguments(
    fields: Fields, mlp: MlpSpec | ExpertsSpec, default_key_value_heads: int, **more: Any
) -> dict[str, Any]:
    """Read a model whose layers all have the same perceptron or experts, and refuse what was not read.

    Args:
        fields: The config.
        mlp: The perceptron or the experts.
        default_key_value_heads: Key/value heads that the config class has of its own.
        **more: Further arguments of `CausalTransformer`.
    """
    norm, max_length = norm_of(fields), fields.count("max_position_embeddings", 32768)
    attention = gated_attention_of(fields, max_length, default_key_value_heads, inert_rotary=IMAGE_PLACES)
    layers = (LayerSpec(mixer=attention, mlp=mlp, norm=norm),) * fields.count("num_hidden_layers")
    arguments = arguments_of(fields, with_delta_nets(fields, layers), norm, max_length, **more)
    block = LayerSpec(mixer=attention, mlp=mlp, norm=norm)
    arguments |= prediction_of(fields, PREDICTION.field, block, is_shared=True)
    if fields.flag(DEDICATED, False) and arguments["prediction"] is not None:
        raise CheckpointError(
            f"{fields.where}: layers that predict further tokens share the token table and the head here, and "
            f"{DEDICATED}=true gives them their own. {LOAD_WITHOUT}"
        )
    fields.finish(PUBLISHED)
    return arguments


def further_config(module: CausalTransformer) -> dict[str, Any]:
    """Write how many layers predict further tokens; nothing where there are none."""
    return {PREDICTION.field: module.prediction.depth, DEDICATED: False} if module.prediction else {}


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Qwen3_5TextConfig`."""
    return hybrid_arguments(fields, mlp_of(fields), default_key_value_heads=4)


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Qwen3_5TextConfig`."""
    mlps = uniform_over(module.layers, lambda layer: perceptron_config(dense_mlp(layer), "intermediate_size"))
    return {**hybrid_config(module), **mlps, **further_config(module)}


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=decoder_weights_but(*MIXER_WEIGHTS),
    ignorable=IGNORABLE,
    left_out=lambda config: VISION,
    prediction=PREDICTION,
)

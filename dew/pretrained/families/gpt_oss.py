"""gpt-oss: attention sinks, every second layer with a window, experts with biases and a clamped gate, in MXFP4."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec
from dew.nn.router import RouterSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    block_config,
    divided_head_dim,
    kinds_config,
    model_config,
    windows_of,
    with_attention,
)
from dew.pretrained.families.experts import experts_config, experts_of, router_config, router_training_of
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, rotary_of, write_rotary
from dew.pretrained.mxfp4 import is_mxfp4, unpacked
from dew.pretrained.recipe import Weight, fused_weights
from dew.pretrained.source import CheckpointError

DEFAULT_THETA, DEFAULT_HEAD_DIM = 150_000.0, 64
# What the config class has where a config says nothing of rotary parameters.
DEFAULT_SCALING = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `GptOssConfig`."""
    _read_quantisation(fields)
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-5), cast="after_scale")
    max_length = fields.count("max_position_embeddings", 131072)
    bias = fields.flag("attention_bias", True)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields) if "head_dim" in fields.config else DEFAULT_HEAD_DIM,
        default_key_value_heads=8 if "num_key_value_heads" not in fields.config else None,
        bias=bias,
        out_bias=bias,
        sinks=True,
        rotary=_rotary_of(fields, max_length),
    )
    router = RouterSpec(top_k=fields.count("num_experts_per_tok", 4), score="softmax_of_chosen", bias=True)
    experts = experts_of(
        fields,
        count="num_local_experts",
        width="intermediate_size",
        router=router,
        limit=fields.number("swiglu_limit", 7.0),
        alpha=fields.number("swiglu_alpha", 1.702),
        bias=True,
    )
    layer = LayerSpec(mixer=attention, mlp=experts, norm=norm)
    slides = [index % 2 == 0 for index in range(fields.count("num_hidden_layers"))]
    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    windows = windows_of(fields, kinds, fields.optional_count("sliding_window", 128))
    layers = tuple(with_attention(layer, window=window) for window in windows)
    training = router_training_of(fields, router.top_k)
    arguments = arguments_of(fields, layers, norm, max_length, router_training=training)
    # The names of the weights' authors for two of these fields, which published configs state beside them.
    fields.finish({"experts_per_token": (router.top_k,), "initial_context_length": _original_length(attention.rotary)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `GptOssConfig`."""
    blocks = block_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "attention_bias": layer.attention.bias,
        },
    )
    experts = experts_config(
        module,
        lambda spec: {"swiglu_limit": spec.limit, "swiglu_alpha": spec.alpha},
        count="num_local_experts",
        width="intermediate_size",
    )
    return {**model_config(module), **blocks, **kinds_config(module), **experts, **router_config(module)}


def _rotary_of(fields: Fields, max_length: int) -> RotarySpec:
    """Read the rotary positions; a config that names none has the scaling of its class, with its own base if any."""
    if fields.get("rope_parameters", None) is None and not fields.get("rope_scaling", None):
        values = {"rope_theta": fields.get("rope_theta", DEFAULT_THETA), **DEFAULT_SCALING}
        return rotary_of(values, max_length, fields.where)
    return read_rotary(fields, max_length, default_theta=DEFAULT_THETA)


def _original_length(rotary: RotarySpec | None) -> tuple[int, ...]:
    original = getattr(rotary and rotary.scaling, "original_max_length", None)
    return () if original is None else (original,)


def _read_quantisation(fields: Fields) -> None:
    """Read how the experts are stored: the tensors say it too, so that nothing but the method needs to be known.

    Raises:
        CheckpointError: If it is another method, or a field of it is not known.
    """
    config = fields.get("quantization_config", None)
    if config is not None and not (
        is_mxfp4(config) and set(config) <= {"quant_method", "modules_to_not_convert", "dequantize"}
    ):
        raise CheckpointError(
            f"{fields.where}: quantization_config must have quant_method 'mxfp4' and no field but "
            f"modules_to_not_convert and dequantize. Received: quantization_config={str(config)[:200]}"
        )


_BLOCK, _PATH = "model.layers.{i}.mlp", "params/layers_{i}/mlp"
FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=(
        Weight("params/layers_{i}/self_attn/sinks", "model.layers.{i}.self_attn.sinks", "N -> N"),
        Weight(f"{_PATH}/router/kernel", f"{_BLOCK}.router.weight", "E D -> D E"),
        Weight(f"{_PATH}/router/bias", f"{_BLOCK}.router.bias", "E -> E"),
        # Columns of gate and up take turns.
        *fused_weights(
            f"{_BLOCK}.experts.gate_up_proj",
            (f"{_PATH}/experts/gate_proj", "E D (F 1) -> E D F", "1"),
            (f"{_PATH}/experts/up_proj", "E D (F 1) -> E D F", "1"),
        ),
        *fused_weights(
            f"{_BLOCK}.experts.gate_up_proj_bias",
            (f"{_PATH}/experts/gate_proj_bias", "E (F 1) -> E F", "1"),
            (f"{_PATH}/experts/up_proj_bias", "E (F 1) -> E F", "1"),
        ),
        Weight(f"{_PATH}/experts/down_proj", f"{_BLOCK}.experts.down_proj", "E F D -> E F D"),
        Weight(f"{_PATH}/experts/down_proj_bias", f"{_BLOCK}.experts.down_proj_bias", "E D -> E D"),
        *DECODER_WEIGHTS,
    ),
    ignorable=IGNORABLE,
    unpacked=unpacked,
)

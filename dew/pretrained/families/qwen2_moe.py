"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and beside them a gated perceptron that every token reads."""

from typing import Any

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.norm import NormSpec
from dew.nn.router import RouterSpec
from dew.pretrained.families.decoder import (
    arguments_of,
    attention_of,
    block_config,
    dense_mlp,
    divided_head_dim,
    kinds_config,
    mlp_of,
    model_config,
    windows_of,
    with_attention,
)
from dew.pretrained.families.experts import (
    expert_weights,
    experts_config,
    experts_of,
    has_experts,
    router_config,
    router_training_of,
    shared_weights,
    sparse_layers_config,
    sparse_layers_of,
)
from dew.pretrained.families.family import DECODER_WEIGHTS, IGNORABLE, Family, uniform
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary

EXPERTS = "model.layers.{i}.mlp"
QWEN_EXPERT_WEIGHTS = expert_weights(EXPERTS, "gate_proj", "up_proj", "down_proj")


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `Qwen2MoeConfig`."""
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    max_length = fields.count("max_position_embeddings", 32768)
    attention = attention_of(
        fields,
        head_dim=divided_head_dim(fields),
        default_key_value_heads=16 if "num_key_value_heads" not in fields.config else None,
        bias=fields.flag("qkv_bias", True),
        rotary=read_rotary(fields, max_length),
    )
    shared = MlpSpec(
        features=fields.count("shared_expert_intermediate_size", 5632), activation=mlp_of(fields).activation
    )
    router = RouterSpec(top_k=fields.count("num_experts_per_tok", 4), normalise=fields.flag("norm_topk_prob", False))
    experts = experts_of(
        fields, count="num_experts", width="moe_intermediate_size", router=router, shared=shared, shared_gate=True
    )
    windows = _windows(fields)
    layers = sparse_layers(fields, attention, experts, norm)
    layers = tuple(with_attention(layer, window=window) for layer, window in zip(layers, windows, strict=True))
    training = router_training_of(fields, router.top_k if any(map(has_experts, layers)) else 0)
    arguments = arguments_of(fields, layers, norm, max_length, router_training=training)
    fields.finish()
    return arguments


def _windows(fields: Fields) -> list[int | None]:
    """Read the windows: every second of the first layers where they are in use."""
    count, is_used = fields.count("num_hidden_layers"), fields.flag("use_sliding_window", False)
    # The class writes a window of 0 where none is in use.
    window = fields.optional_count("sliding_window", 4096) if is_used else fields.get("sliding_window", None)
    last = fields.count("max_window_layers", 28, least=0)
    slides = [is_used and index % 2 == 0 and index < last for index in range(count)]
    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    return windows_of(fields, kinds, window if is_used else None)


def sparse_layers(
    fields: Fields, attention: AttentionSpec, experts: ExpertsSpec, norm: NormSpec
) -> tuple[LayerSpec, ...]:
    """Build the layers, those without experts with the perceptron of `intermediate_size`.

    Args:
        fields: The config.
        attention: Attention of every layer.
        experts: Experts of those that have them.
        norm: Every norm.
    """
    is_sparse = sparse_layers_of(fields)
    dense = mlp_of(fields) if not all(is_sparse) else None
    fields.get("intermediate_size", None)  # read also where no layer has it
    return tuple(LayerSpec(mixer=attention, mlp=experts if each else dense, norm=norm) for each in is_sparse)


def dense_config(module: CausalTransformer) -> dict[str, Any]:
    """Write the perceptrons of layers without experts; nothing where there are none."""
    dense = [dense_mlp(layer) for layer in module.layers if not has_experts(layer)]
    if not dense:
        return {}
    activation = module.expert_layers[0].activation if module.expert_layers else dense[0].activation
    if any(spec != MlpSpec(features=spec.features, activation=activation) for spec in dense):
        raise ValueError("the config has gated perceptrons without biases, with the activation of the experts")
    return uniform({"intermediate_size": [spec.features for spec in dense]})


def shared_config(spec: ExpertsSpec) -> dict[str, Any]:
    """Write the perceptron beside the experts."""
    return {"norm_topk_prob": spec.router.normalise, "shared_expert_intermediate_size": shared_width(spec)}


def shared_width(spec: ExpertsSpec) -> int:
    """Give the width of the perceptron beside the experts.

    Raises:
        ValueError: If there is none.
    """
    if spec.shared is None:
        raise ValueError("the config has a shared perceptron in every layer with experts. Received: shared=None")
    return spec.shared.features


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `Qwen2MoeConfig`."""
    blocks = block_config(
        module,
        lambda layer: {
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length),
            "qkv_bias": layer.attention.bias,
        },
    )
    if blocks.pop("head_dim") * blocks["num_attention_heads"] != module.features:
        raise ValueError("a Qwen2-MoE config takes the width of a head from that of the model")
    experts = experts_config(module, shared_config, count="num_experts", width="moe_intermediate_size")
    kinds = kinds_config(module)
    is_used = kinds["sliding_window"] is not None
    windows = {**kinds, "use_sliding_window": True} if is_used else {"use_sliding_window": False}
    parts = (blocks, experts, dense_config(module), sparse_layers_config(module), windows, router_config(module))
    return {**model_config(module), **{name: value for part in parts for name, value in part.items()}}


FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=(
        *QWEN_EXPERT_WEIGHTS,
        *shared_weights(EXPERTS, "shared_expert", "shared_expert_gate"),
        *DECODER_WEIGHTS,
    ),
    ignorable=IGNORABLE,
)

"""Config fields that most families of decoders share, in both directions.

Entry points: `attention_of`, `own_keys_of`, `mlp_of`, `windows_of`, `arguments_of` read; `model_config`,
`layer_config`, `kinds_config` write. A family's file says what differs: defaults, norms, biases, and fields of its own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.latent_attention import attention_form
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.family import uniform
from dew.pretrained.families.fields import Fields
from dew.pretrained.source import CheckpointError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""Name of an activation in a config, to ours; the first name of each is the one that is written."""


MAX_HEAD_DIM = 65_536
LAYER_KINDS = ("full_attention", "sliding_attention")
"""What `layer_types` may say of a layer."""


def implied_head_dim(fields: Fields, *, heads: str = "num_attention_heads", width: str = "hidden_size") -> int:
    """Divide the width of the model by its heads.

    Args:
        fields: The config.
        heads: Field of the heads.
        width: Field of the width.

    Raises:
        CheckpointError: If the heads do not divide the width.
    """
    count, features = fields.count(heads), fields.count(width)
    if features % count:
        raise CheckpointError(f"{fields.where}: {width}={features} is not a multiple of {heads}={count}.")
    return features // count


def divided_head_dim(fields: Fields) -> int:
    """Read `head_dim`; where the config states none, the width of the model over its heads.

    Raises:
        CheckpointError: If the heads do not divide the width.
    """
    stated = fields.get("head_dim", None)
    return implied_head_dim(fields) if stated is None else fields.count("head_dim")


def attention_of(
    fields: Fields, *, head_dim: int, default_key_value_heads: int | None = None, **options: Any
) -> AttentionSpec:
    """Read the heads.

    Args:
        fields: The config.
        head_dim: Width of a head.
        default_key_value_heads: Key/value heads that the config class has of its own; None means one for each head.
        **options: Further fields of the spec.

    Raises:
        CheckpointError: If the heads cannot share their keys evenly, or a rotated head is odd.
    """
    heads = fields.count("num_attention_heads")
    # The config classes take null as one for each head, and their own default for an absent field alone.
    null = default_key_value_heads is None or "num_key_value_heads" in fields.config
    default = heads if null else default_key_value_heads
    key_value_heads = fields.count("num_key_value_heads", default)
    if heads % key_value_heads or head_dim % 2:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads must be a multiple of num_key_value_heads and head_dim even. "
            f"Received: num_attention_heads={heads}, num_key_value_heads={key_value_heads}, head_dim={head_dim}"
        )
    return _spec(fields, num_heads=heads, num_kv_heads=key_value_heads, head_dim=head_dim, **options)


def own_keys_of(
    fields: Fields, *, heads: str = "num_attention_heads", width: str = "hidden_size", **options: Any
) -> AttentionSpec:
    """Read heads that each have keys of their own and are together as wide as the model.

    Args:
        fields: The config.
        heads: Field of the heads.
        width: Field of the width.
        **options: Further fields of the spec.

    Raises:
        CheckpointError: If the heads do not divide the width, or a rotated head is odd.
    """
    count = fields.count(heads)
    head_dim = implied_head_dim(fields, heads=heads, width=width)
    return _spec(fields, num_heads=count, num_kv_heads=count, head_dim=head_dim, **options)


def _spec(fields: Fields, **options: Any) -> AttentionSpec:
    if options["head_dim"] > MAX_HEAD_DIM:  # tables of frequencies are made from it
        raise CheckpointError(f"{fields.where}: heads of {options['head_dim']} dimensions; at most {MAX_HEAD_DIM}.")
    try:
        return AttentionSpec(**options)
    except ValueError as error:
        raise CheckpointError(f"{fields.where}: {error}") from None


def mlp_of(
    fields: Fields,
    *,
    name: str = "hidden_act",
    default: str = "silu",
    choices: Mapping[str, Any] = ACTIVATIONS,
    **options: Any,
) -> MlpSpec:
    """Read the perceptron.

    Args:
        fields: The config.
        name: Field of the activation.
        default: What it is in a config without it.
        choices: Known activations.
        **options: Further fields of the spec.
    """
    activation = fields.choice(name, choices, default)
    return MlpSpec(features=fields.count("intermediate_size"), activation=activation, **options)


def windows_of(fields: Fields, default_kinds: Sequence[str], window: int | None) -> list[int | None]:
    """Read `layer_types`: the window of each layer, None where it reads everything.

    Args:
        fields: The config.
        default_kinds: What the config class makes of a config without the field, one kind per layer.
        window: The one window of the config; None where it states none.

    Raises:
        CheckpointError: If the field names something else, or a window that the config lacks.
    """
    kinds = fields.get("layer_types", list(default_kinds))
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(default_kinds)
        or not all(isinstance(kind, str) and kind in LAYER_KINDS for kind in kinds)
    ):
        raise CheckpointError(
            f"{fields.where}: layer_types must say {' or '.join(LAYER_KINDS)} for each of {len(default_kinds)} layers. "
            f"Received: layer_types={str(kinds)[:200]}"
        )
    if window is None and "sliding_attention" in kinds:
        raise CheckpointError(f"{fields.where}: layer_types has sliding_attention, but no sliding_window is in use.")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def with_attention(layer: LayerSpec, **fields: Any) -> LayerSpec:
    """Give a block with other fields in its attention."""
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, **fields))


def arguments_of(
    fields: Fields, layers: tuple[LayerSpec, ...], norm: NormSpec, max_length: int, *, tied: bool = False, **more: Any
) -> dict[str, Any]:
    """Read what is outside the blocks.

    Args:
        fields: The config.
        layers: The blocks.
        norm: Norm after the last block.
        max_length: Longest context in tokens.
        tied: Whether a config that does not say so ties the head to the table.
        **more: Further arguments.

    Returns:
        Arguments of `CausalTransformer`.
    """
    if attends(layers):
        more["attention_dropout_rate"] = fields.rate("attention_dropout")
    return {
        "vocab_size": fields.count("vocab_size"),
        "features": fields.count("hidden_size"),
        "layers": layers,
        "norm": norm,
        "tie_embeddings": fields.flag("tie_word_embeddings", tied),
        "max_length": max_length,
        **more,
    }


def model_config(module: CausalTransformer) -> dict[str, Any]:
    """Write what is outside the blocks."""
    rates = {"attention_dropout": module.attention_dropout_rate} if attends(module.layers) else {}
    return {
        "vocab_size": module.vocab_size,
        "hidden_size": module.features,
        "num_hidden_layers": len(module.layers),
        "max_position_embeddings": module.max_length,
        "tie_word_embeddings": module.tie_embeddings,
        **rates,
    }


def attends(layers: Sequence[LayerSpec]) -> bool:
    """Say whether any block attends."""
    return any(attention_form(layer.mixer) for layer in layers)


def layer_config(
    module: CausalTransformer,
    own: Callable[[LayerSpec], Mapping[str, Any]] = lambda layer: {},
    *,
    activation: str = "hidden_act",
    eps: str = "rms_norm_eps",
) -> dict[str, Any]:
    """Write what the config states once for all blocks.

    Args:
        module: The model.
        own: Further fields of a block.
        activation: Name of the activation's field.
        eps: Name of the norms' epsilon.

    Raises:
        ValueError: If the blocks differ in a field.
    """
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}

    def with_mlp(layer: LayerSpec) -> Mapping[str, Any]:
        mlp = dense_mlp(layer)
        return {"intermediate_size": mlp.features, activation: names[mlp.activation], **own(layer)}

    return block_config(module, with_mlp, eps=eps)


def block_config(
    module: CausalTransformer, own: Callable[[LayerSpec], Mapping[str, Any]], *, eps: str = "rms_norm_eps"
) -> dict[str, Any]:
    """Write what the config states once for all blocks, whatever follows their attention.

    Args:
        module: The model.
        own: Further fields of a block.
        eps: Name of the norms' epsilon.

    Raises:
        ValueError: If the blocks differ in a field.
    """
    per_layer = [
        {
            "num_attention_heads": layer.attention.num_heads,
            "num_key_value_heads": layer.attention.num_kv_heads,
            "head_dim": layer.attention.head_dim,
            eps: layer.norm.eps,
            **own(layer),
        }
        for layer in module.layers
    ]
    return uniform({name: [layer[name] for layer in per_layer] for name in per_layer[0]})


def dense_mlp(layer: LayerSpec) -> MlpSpec:
    """Give the perceptron of a block for a config that has one in every block.

    Raises:
        ValueError: If the block has none, or experts.
    """
    if not isinstance(layer.mlp, MlpSpec):
        raise ValueError(f"the config has a perceptron in every layer. Received: a layer with mlp={layer.mlp}")
    return layer.mlp


def kinds_config(module: CausalTransformer) -> dict[str, Any]:
    """Write which blocks have a window: `layer_types` and the one `sliding_window`; null where none has.

    Raises:
        ValueError: If two blocks have different windows.
    """
    windows = [layer.attention.window for layer in module.layers]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"the config states one sliding_window. Received: {sorted(sizes)}")
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"layer_types": kinds, "sliding_window": next(iter(sizes), None)}

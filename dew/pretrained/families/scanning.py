"""What the families with Mamba-2 layers share: the names of a mixer's weights and its config fields, both ways.

Entry points: `scan_weights`, `read_scan`, `write_scan`, `ScanFields`; `hybrid_config` for models that attend in some
layers, whose config states things once for the layers of a kind.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.mlp import MlpSpec
from dew.pretrained.families.decoder import ACTIVATIONS, model_config
from dew.pretrained.families.family import uniform
from dew.pretrained.families.fields import Fields
from dew.pretrained.recipe import Weight, fused_weights
from dew.pretrained.source import CheckpointError

MAMBA = "params/layers_{i}/mamba"
UNBOUNDED = (0.0, math.inf)
UNATTENDED = {"num_attention_heads": 1, "num_key_value_heads": 1}
"""Heads in the config of a hybrid without attention: its class asks for them."""
UNSCANNED = {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 1}
"""Sizes of the scan in the config of a hybrid without one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanFields:
    """Names and defaults of the fields in one family's config.

    Attributes:
        heads: Field of the heads, and its default.
        head_dim: Field of a head's width, and its default; "auto" divides the inner width.
        groups: Field of the groups, and its default.
        state: Field of the state's width, and its default.
        kernel: Field of the convolution's taps, and its default.
        expand: Field of the inner width over the model's, and its default.
        conv_bias: Field of the convolution's bias, and its default.
        bias: Field of the projections' bias, and its default.
        eps: Field of the norms' epsilon, and its default.
    """

    heads: tuple[str, int]
    head_dim: tuple[str, int | str]
    groups: tuple[str, int]
    state: tuple[str, int]
    kernel: tuple[str, int]
    expand: tuple[str, int]
    conv_bias: tuple[str, bool]
    bias: tuple[str, bool]
    eps: tuple[str, float]


HYBRID_FIELDS = ScanFields(
    heads=("mamba_n_heads", 128),
    head_dim=("mamba_d_head", "auto"),
    groups=("mamba_n_groups", 1),
    state=("mamba_d_state", 256),
    kernel=("mamba_d_conv", 4),
    expand=("mamba_expand", 2),
    conv_bias=("mamba_conv_bias", True),
    bias=("mamba_proj_bias", False),
    eps=("rms_norm_eps", 1e-5),
)


def scan_weights(tensor: str) -> tuple[Weight, ...]:
    """Name the weights of a mixer.

    Args:
        tensor: Beginning of their names in the file, as `"model.layers.{i}.mamba"`.
    """
    heads, groups = "(N H)", "(G P)"
    projections = (("gate", heads, "N"), ("x", heads, "N"), ("b", groups, "G"), ("c", groups, "G"), ("dt", "N", "N"))
    convolved = projections[1:4]

    def plain(rows: str) -> str:
        return rows.strip("()")

    return (
        *fused_weights(
            f"{tensor}.in_proj.weight",
            *((f"{MAMBA}/{name}_proj/kernel", f"{rows} D -> D {plain(rows)}", dim) for name, rows, dim in projections),
        ),
        *fused_weights(
            f"{tensor}.in_proj.bias",
            *((f"{MAMBA}/{name}_proj/bias", f"{rows} -> {plain(rows)}", dim) for name, rows, dim in projections),
        ),
        *fused_weights(
            f"{tensor}.conv1d.weight",
            *((f"{MAMBA}/{name}_conv/kernel", f"{rows} 1 W -> {plain(rows)} W", dim) for name, rows, dim in convolved),
        ),
        *fused_weights(
            f"{tensor}.conv1d.bias",
            *((f"{MAMBA}/{name}_conv/bias", f"{rows} -> {plain(rows)}", dim) for name, rows, dim in convolved),
        ),
        *(Weight(f"{MAMBA}/{name}", f"{tensor}.{name}", "N -> N") for name in ("A_log", "D", "dt_bias")),
        Weight(f"{MAMBA}/norm_scale", f"{tensor}.norm.weight", "(N H) -> N H"),
        Weight(f"{MAMBA}/out_proj/kernel", f"{tensor}.out_proj.weight", "D (N H) -> N H D"),
        Weight(f"{MAMBA}/out_proj/bias", f"{tensor}.out_proj.bias", "D -> D"),
    )


def read_scan(fields: Fields, names: ScanFields) -> Mamba2Spec:
    """Read the mixer of a config.

    Args:
        fields: The config.
        names: What its fields are called.

    Raises:
        CheckpointError: If its sizes do not fit together.
    """
    heads, expand = fields.count(*names.heads), fields.count(*names.expand)
    width = expand * fields.count("hidden_size")
    stated = fields.get(*names.head_dim)
    head_dim = width // heads if stated == "auto" else fields.count(*names.head_dim)
    if heads * head_dim != width:
        raise CheckpointError(
            f"{fields.where}: {names.heads[0]} * {names.head_dim[0]} must be {names.expand[0]} * hidden_size = {width}"
            f". Received: {names.heads[0]}={heads}, {names.head_dim[0]}={stated}"
        )
    groups = fields.count(*names.groups)
    try:
        return Mamba2Spec(
            num_heads=heads,
            head_dim=head_dim,
            num_groups=groups,
            state_size=fields.count(*names.state),
            conv_kernel=fields.count(*names.kernel),
            conv_bias=fields.flag(*names.conv_bias),
            bias=fields.flag(*names.bias),
            activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
            norm_eps=fields.number(*names.eps),
            norm_groups=groups,
            step_limits=_limits(fields),
        )
    except ValueError as error:
        raise CheckpointError(f"{fields.where}: {error}") from None


def write_scan(spec: Mamba2Spec, features: int, names: ScanFields) -> dict[str, Any]:
    """Write the fields of a mixer; the inverse of `read_scan`.

    Args:
        spec: What to write.
        features: Width of the model.
        names: What the fields are called.

    Raises:
        ValueError: If the config cannot express the spec.
    """
    width = spec.num_heads * spec.head_dim
    if width % features or spec.norm_groups != spec.num_groups:
        raise ValueError(
            "the config takes the scan's width as a multiple of the model's, and norm_groups as num_groups. Received: "
            f"width={width}, features={features}, norm_groups={spec.norm_groups}, num_groups={spec.num_groups}"
        )
    low, high = spec.step_limits
    limits = {"time_step_limit": [low, {"__float__": "Infinity"} if math.isinf(high) else high]}
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {
        names.heads[0]: spec.num_heads,
        names.head_dim[0]: spec.head_dim,
        names.groups[0]: spec.num_groups,
        names.state[0]: spec.state_size,
        names.kernel[0]: spec.conv_kernel,
        names.expand[0]: width // features,
        names.conv_bias[0]: spec.conv_bias,
        names.bias[0]: spec.bias,
        names.eps[0]: spec.norm_eps,
        "hidden_act": activations[spec.activation],
        **({} if spec.step_limits == UNBOUNDED else limits),
    }


def uniform_over(layers: Sequence[LayerSpec], write: Callable[[LayerSpec], Mapping[str, Any]]) -> dict[str, Any]:
    """Write what a config states once for several layers; nothing where there are none.

    Raises:
        ValueError: If the layers differ in a field.
    """
    written = [write(layer) for layer in layers]
    return uniform({name: [each[name] for each in written] for name in written[0]}) if written else {}


def scans(layer: LayerSpec) -> bool:
    """Say whether a block has a Mamba-2 mixer."""
    return isinstance(layer.mixer, Mamba2Spec)


def hybrid_config(
    module: CausalTransformer,
    names: ScanFields,
    attention: Callable[[LayerSpec], Mapping[str, Any]],
    every: Callable[[LayerSpec], Mapping[str, Any]],
) -> dict[str, Any]:
    """Write a config that states once what scanning layers have, what attending layers have, and what all have.

    Args:
        module: The model.
        names: What the fields of the scan are called.
        attention: Fields of an attending layer beside its heads.
        every: Fields of any layer beside its norm.

    Raises:
        ValueError: If layers of a kind differ.
    """

    def scan(layer: LayerSpec) -> dict[str, Any]:
        assert isinstance(layer.mixer, Mamba2Spec), "chosen below"
        return write_scan(layer.mixer, module.features, names)

    def heads(layer: LayerSpec) -> dict[str, Any]:
        spec = layer.attention
        return {
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "attention_bias": spec.bias,
            **attention(layer),
        }

    layers = module.layers
    return {
        **model_config(module),
        **(uniform_over([layer for layer in layers if scans(layer)], scan) or UNSCANNED),
        **(uniform_over([layer for layer in layers if not scans(layer)], heads) or UNATTENDED),
        **uniform_over(layers, lambda layer: {"rms_norm_eps": layer.norm.eps, **every(layer)}),
    }


def perceptron_config(mlp: MlpSpec, width: str) -> dict[str, Any]:
    """Write a perceptron.

    Args:
        mlp: The perceptron.
        width: Field of its hidden width.
    """
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {width: mlp.features, "hidden_act": activations[mlp.activation]}


def _limits(fields: Fields) -> tuple[float, float]:
    """Read the bounds of the step sizes; infinity is a number or an object that names it."""
    stated = fields.get("time_step_limit", list(UNBOUNDED))
    bounds = [_bound(each) for each in stated] if isinstance(stated, list) else []
    if len(bounds) != 2 or any(map(math.isnan, bounds)):
        raise CheckpointError(
            f"{fields.where}: time_step_limit must be two numbers. Received: time_step_limit={str(stated)[:200]}"
        )
    return bounds[0], bounds[1]


def _bound(stated: Any) -> float:
    """Read one bound; NaN where it is no number."""
    if stated == {"__float__": "Infinity"}:
        return math.inf
    return float(stated) if type(stated) in (int, float) else math.nan

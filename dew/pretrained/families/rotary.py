"""Rotary positions in a config: `rope_parameters`, or the older `rope_theta` beside `rope_scaling`.

Entry points: `read_rotary`, `write_rotary`.
"""

import dataclasses
from typing import Any

from dew.nn.rope import DynamicScaling, LinearScaling, Llama3Scaling, RotarySpec, Scaling, YarnScaling
from dew.pretrained.families.fields import Fields, positive
from dew.pretrained.source import CheckpointError

DEFAULT_THETA = 10000.0
# Config name of each field of a scaling, and whether it must be there.
_FIELDS: dict[str, tuple[type, dict[str, tuple[str, bool]]]] = {
    "linear": (LinearScaling, {"factor": ("factor", True)}),
    "dynamic": (DynamicScaling, {"factor": ("factor", True)}),
    "llama3": (
        Llama3Scaling,
        {
            "factor": ("factor", True),
            "low_freq_factor": ("low_freq_factor", True),
            "high_freq_factor": ("high_freq_factor", True),
            "original_max_position_embeddings": ("original_max_length", False),
        },
    ),
    "yarn": (
        YarnScaling,
        {
            "factor": ("factor", True),
            "original_max_position_embeddings": ("original_max_length", False),
            "beta_fast": ("beta_fast", False),
            "beta_slow": ("beta_slow", False),
            "attention_factor": ("attention_factor", False),
            "mscale": ("mscale", False),
            "mscale_all_dim": ("mscale_all_dim", False),
            "truncate": ("truncate", False),
        },
    ),
}


def read_rotary(fields: Fields, max_length: int) -> RotarySpec:
    """Read how a config rotates.

    Args:
        fields: The config.
        max_length: Its longest context in tokens, what scalings that name no original context refer to.

    Raises:
        CheckpointError: If the kind of scaling or one of its fields is not known.
    """
    parameters = fields.get("rope_parameters", None)
    older = fields.get("rope_scaling", None)
    if parameters is not None and older is not None and parameters != older:
        raise CheckpointError(f"{fields.where}: rope_parameters and rope_scaling disagree; keep one of them.")
    values = dict(_mapping(older if parameters is None else parameters, fields))
    theta = positive(values.pop("rope_theta", fields.get("rope_theta", DEFAULT_THETA)), "rope_theta", fields.where)
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    if values.pop("partial_rotary_factor", fields.get("partial_rotary_factor", 1)) != 1:
        raise CheckpointError(f"{fields.where}: partial_rotary_factor other than 1 is not supported by this family.")
    if kind == "default":
        return RotarySpec(theta=theta)
    return RotarySpec(theta=theta, scaling=_scaling(kind, values, max_length, fields.where))


def write_rotary(spec: RotarySpec | None, max_length: int) -> dict[str, Any]:
    """Write `rope_parameters`; the inverse of `read_rotary`.

    Raises:
        ValueError: If the config cannot express the spec.
    """
    if spec is None:
        raise ValueError("every layer needs rotary positions. Received: rotary=None")
    if spec.fraction != 1:
        raise ValueError(f"this family rotates whole heads. Received: fraction={spec.fraction}")
    if spec.scaling is None:
        return {"rope_type": "default", "rope_theta": spec.theta}
    kind = next(name for name, (scaling, _) in _FIELDS.items() if isinstance(spec.scaling, scaling))
    if isinstance(spec.scaling, DynamicScaling) and spec.scaling.original_max_length != max_length:
        raise ValueError(
            "dynamic scaling starts at the longest context. Received: "
            f"original_max_length={spec.scaling.original_max_length}, max_length={max_length}"
        )
    values = dataclasses.asdict(spec.scaling)
    defaults = {field.name: field.default for field in dataclasses.fields(spec.scaling)}
    names = {name: ours for name, (ours, _) in _FIELDS[kind][1].items() if values[ours] != defaults[ours]}
    written = {name: values[ours] for name, ours in names.items()}
    return {"rope_type": kind, "rope_theta": spec.theta, **written}


def _mapping(value: Any, fields: Fields) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{fields.where}: rope parameters must be an object. Received: {value!r}")
    return value


def _scaling(kind: Any, values: dict[str, Any], max_length: int, where: object) -> Scaling:
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise CheckpointError(f"{where}: rope_type={kind!r} is not supported; known: default, {', '.join(_FIELDS)}.")
    scaling, names = _FIELDS[kind]
    unknown = [name for name, value in values.items() if name not in names and value is not None]
    if kind == "dynamic" and values.get("original_max_position_embeddings") == max_length:
        unknown = [name for name in unknown if name != "original_max_position_embeddings"]
    if unknown:
        raise CheckpointError(f"{where}: rope_type={kind!r} does not take {', '.join(map(repr, unknown))}.")
    arguments: dict[str, Any] = {}
    for name, (ours, required) in names.items():
        value = values.get(name)
        if ours == "truncate" and value is not None:
            if type(value) is not bool:
                raise CheckpointError(f"{where}: truncate must be true or false. Received: truncate={value!r}")
            arguments[ours] = value
        elif value is not None:
            arguments[ours] = positive(value, name, where)
        elif required:
            raise CheckpointError(f"{where}: rope_type={kind!r} needs {name!r}.")
    if kind in ("dynamic", "llama3", "yarn"):
        arguments["original_max_length"] = int(arguments.get("original_max_length", max_length))
    return scaling(**arguments)

"""Rotary positions in a config: `rope_parameters`, or the older `rope_theta` beside `rope_scaling`.

Entry points: `read_rotary` and `write_rotary`; `read_rotaries` and `write_rotaries` where kinds of layers differ.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from dew.nn.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotarySpec,
    Scaling,
    YarnScaling,
)
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
    "longrope": (
        LongRopeScaling,
        {
            "short_factor": ("short_factor", True),
            "long_factor": ("long_factor", True),
            "original_max_position_embeddings": ("original_max_length", False),
            "attention_factor": ("attention_factor", False),
        },
    ),
}
# Scalings that a field of this name outside the rotary parameters sets the original context of.
_NAMES_ORIGINAL = ("llama3", "yarn", "longrope")


def read_rotary(
    fields: Fields,
    max_length: int,
    *,
    default_theta: float = DEFAULT_THETA,
    default_fraction: float = 1.0,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    partial: bool = False,
    kinds: Mapping[str, str] | None = None,
    default_original: int | None = None,
    inert: Collection[str] = (),
) -> RotarySpec:
    """Read how a config rotates.

    Args:
        fields: The config.
        max_length: Its longest context in tokens, what scalings that name no original context refer to.
        default_theta: Base of a config that states none.
        default_fraction: Rotated part of each head in a config that states none.
        names: Fields of the two where no parameters state them.
        partial: Whether the family may rotate a part of each head.
        kinds: Kinds of scaling that the family takes and what it means by them; None means all, as they are.
        default_original: Original context that the config class has of its own.
        inert: Parameters that change nothing in the family.

    Raises:
        CheckpointError: If the kind of scaling or one of its fields is not known.
    """
    parameters = fields.get("rope_parameters", None)
    older = fields.get("rope_scaling", None)
    if parameters is not None and older is not None and parameters != older:
        raise CheckpointError(f"{fields.where}: rope_parameters and rope_scaling disagree; keep one of them.")
    stated = _mapping(older if parameters is None else parameters, fields)
    values = {name: value for name, value in stated.items() if name not in inert}
    values.setdefault("rope_theta", fields.get(names[0], default_theta))
    values.setdefault("partial_rotary_factor", fields.get(names[1], default_fraction))
    kind = values.get("rope_type", values.get("type", "default"))
    if kinds is not None:
        if not isinstance(kind, str) or kind not in kinds:
            raise CheckpointError(f"{fields.where}: rope_type={kind!r} is not supported; known: {', '.join(kinds)}.")
        kind = values["rope_type"] = kinds[kind]
    original = fields.get("original_max_position_embeddings", default_original)
    if original is not None and kind in _NAMES_ORIGINAL:
        values["original_max_position_embeddings"] = original
    return rotary_of(values, max_length, fields.where, partial=partial)


def rotary_of(values: dict[str, Any], max_length: int, where: object, *, partial: bool = False) -> RotarySpec:
    """Read rotary parameters that state a base; the rest as `read_rotary`.

    Raises:
        CheckpointError: If the kind of scaling or one of its fields is not known.
    """
    values = dict(values)
    theta = positive(values.pop("rope_theta", None), "rope_theta", where)
    fraction = positive(values.pop("partial_rotary_factor", 1.0), "partial_rotary_factor", where)
    if fraction != 1 and not partial:
        raise CheckpointError(f"{where}: partial_rotary_factor other than 1 is not supported by this family.")
    if fraction > 1:
        raise CheckpointError(f"{where}: partial_rotary_factor must not exceed 1. Received: {fraction}")
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    try:
        scaling = None if kind == "default" else _scaling(kind, values, max_length, where)
        return RotarySpec(theta=theta, scaling=scaling, fraction=fraction)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def read_rotaries(fields: Fields, max_length: int, bases: dict[str, tuple[str, float]]) -> dict[str, RotarySpec]:
    """Read the rotary positions of each kind of layer; a `rope_scaling` beside them is about full attention alone.

    Args:
        fields: The config.
        max_length: Its longest context in tokens.
        bases: For each kind, the field that states its base where no parameters do, and the base without it.

    Raises:
        CheckpointError: If the parameters are not one object per kind.
    """
    parameters, scaling = fields.get("rope_parameters", {}), fields.get("rope_scaling", {})
    objects = [parameters, scaling, *(parameters.values() if isinstance(parameters, dict) else ())]
    if not all(isinstance(each, dict | None) for each in objects) or not set(parameters) <= set(bases):
        raise CheckpointError(
            f"{fields.where}: rope_parameters must hold objects for {' and '.join(bases)}, rope_scaling be one. "
            f"Received: rope_parameters={parameters!r}, rope_scaling={scaling!r}"
        )
    found = {}
    for kind, (name, base) in bases.items():
        values = {"rope_theta": fields.get(name, base), **(parameters.get(kind) or {})}
        if kind == "full_attention":
            values |= scaling
        found[kind] = rotary_of(values, max_length, fields.where)
    return found


def write_rotaries(kinds: list[str], specs: list[RotarySpec | None], max_length: int) -> dict[str, Any]:
    """Write `rope_parameters` with one object per kind of layer; the inverse of `read_rotaries`.

    Args:
        kinds: Kind of each layer.
        specs: Rotary positions of each layer.
        max_length: Longest context of the config.

    Raises:
        ValueError: If layers of one kind differ.
    """
    written: dict[str, Any] = {}
    for kind, spec in zip(kinds, specs, strict=True):
        values = write_rotary(spec, max_length)
        if written.setdefault(kind, values) != values:
            raise ValueError(
                f"the config states the rotary positions of {kind} once. Received: {written[kind]}, {values}"
            )
    return written


def write_rotary(spec: RotarySpec | None, max_length: int, *, partial: bool = False) -> dict[str, Any]:
    """Write `rope_parameters`; the inverse of `read_rotary`.

    Args:
        spec: What to write.
        max_length: Longest context of the config.
        partial: Whether the family states the rotated part of a head, also where it is all of it.

    Raises:
        ValueError: If the config cannot express the spec.
    """
    if spec is None:
        raise ValueError("every layer needs rotary positions. Received: rotary=None")
    if spec.fraction != 1 and not partial:
        raise ValueError(f"this family rotates whole heads. Received: fraction={spec.fraction}")
    shared = {"rope_theta": spec.theta, **({"partial_rotary_factor": spec.fraction} if partial else {})}
    if spec.scaling is None:
        return {"rope_type": "default", **shared}
    kind = next(name for name, (scaling, _) in _FIELDS.items() if isinstance(spec.scaling, scaling))
    if isinstance(spec.scaling, DynamicScaling) and spec.scaling.original_max_length != max_length:
        raise ValueError(
            "dynamic scaling starts at the longest context. Received: "
            f"original_max_length={spec.scaling.original_max_length}, max_length={max_length}"
        )
    values = dataclasses.asdict(spec.scaling)
    defaults = {field.name: field.default for field in dataclasses.fields(spec.scaling)}
    names = {name: ours for name, (ours, _) in _FIELDS[kind][1].items() if values[ours] != defaults[ours]}
    written = {name: list(value) if isinstance(value := values[ours], tuple) else value for name, ours in names.items()}
    if isinstance(spec.scaling, LongRopeScaling):
        implied = longrope_factor(max_length / spec.scaling.original_max_length, spec.scaling.original_max_length)
        if spec.scaling.attention_factor == implied:
            written.pop("attention_factor", None)
        else:
            written["attention_factor"] = spec.scaling.attention_factor
    return {"rope_type": kind, **shared, **written}


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
    ignored = {"factor"} if kind == "longrope" else set()
    if kind == "dynamic" and values.get("original_max_position_embeddings") == max_length:
        ignored.add("original_max_position_embeddings")
    unknown = [
        name for name, value in values.items() if name not in names and name not in ignored and value is not None
    ]
    if unknown:
        raise CheckpointError(f"{where}: rope_type={kind!r} does not take {', '.join(map(repr, unknown))}.")
    missing = [name for name, (_, required) in names.items() if required and values.get(name) is None]
    if missing:
        raise CheckpointError(f"{where}: rope_type={kind!r} needs {missing[0]!r}.")
    arguments = {
        ours: _value(values[name], name, where) for name, (ours, _) in names.items() if values.get(name) is not None
    }
    if kind != "linear":
        arguments["original_max_length"] = int(arguments.get("original_max_length", max_length))
        if arguments["original_max_length"] < 2:
            raise CheckpointError(
                f"{where}: rope_type={kind!r} needs an original context of 2 tokens or more. Received: "
                f"{arguments['original_max_length']}"
            )
    if kind == "longrope" and "attention_factor" not in arguments:
        original = arguments["original_max_length"]
        stretch = max_length / original if values.get("factor") is None else positive(values["factor"], "factor", where)
        arguments["attention_factor"] = longrope_factor(stretch, original)
    return scaling(**arguments)


def _value(value: Any, name: str, where: object) -> Any:
    """Check one field of a scaling: a flag, a list of numbers, or a number."""
    if name == "truncate":
        if type(value) is not bool:
            raise CheckpointError(f"{where}: truncate must be true or false. Received: truncate={value!r}")
        return value
    if name in ("short_factor", "long_factor"):
        if not isinstance(value, list):
            raise CheckpointError(f"{where}: {name} must be a list of numbers. Received: {name}={value!r}")
        return tuple(positive(each, name, where) for each in value)
    return positive(value, name, where)


def longrope_factor(stretch: float, original: int) -> float:
    """Factor on cos and sin of a context stretched from `original` tokens."""
    return 1.0 if stretch <= 1 or original < 2 else math.sqrt(1 + math.log(stretch) / math.log(original))

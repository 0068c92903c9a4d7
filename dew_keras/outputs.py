"""Outputs of a module as a flat list, and what `compile` gives per output.

Entry points: `flatten_outputs`, `per_output`, `align_targets`. An output is named by its key when a module
returns a dict, and has no name when it returns a tuple or a list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Kind = Literal["binary", "sparse", "categorical"]


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a module.

    Attributes:
        name: Its key, or None.
        prediction: Shape of the module's output, rows first.
        target: Shape of what it is compared with, or None when there is nothing.
    """

    name: str | None
    prediction: tuple[int, ...]
    target: tuple[int, ...] | None


def flatten_outputs(tree: Any) -> tuple[list[str | None], list[Any]]:
    """List a module's outputs.

    Args:
        tree: An array, or a dict, tuple or list of arrays.

    Returns:
        Names and arrays; keys of a dict in sorted order.

    Raises:
        ValueError: If outputs are nested deeper.
    """
    if isinstance(tree, Mapping):
        names: list[str | None] = [str(name) for name in sorted(tree)]
        leaves = [tree[name] for name in sorted(tree)]
    elif isinstance(tree, tuple | list):
        names, leaves = [None] * len(tree), list(tree)
    else:
        return [None], [tree]
    if any(isinstance(leaf, Mapping | tuple | list) for leaf in leaves):
        raise ValueError(
            "A module may return an array, or a dict, tuple or list of arrays; nested outputs are not available. "
            f"Received the structure: {_structure(tree)}"
        )
    return names, leaves


def align_targets(values: Any, names: Sequence[str | None], argument: str) -> list[Any]:
    """List targets, or sample weights, in the order of the outputs.

    Args:
        values: An array, or a dict, tuple or list of arrays; None is None for every output.
        names: Names of the outputs.
        argument: What the values are, for the error.

    Returns:
        One entry per output. One array of sample weights serves every output.

    Raises:
        ValueError: If the structure does not fit the outputs.
    """
    if values is None:
        return [None] * len(names)
    if isinstance(values, Mapping):
        if set(map(str, values)) == {name for name in names if name is not None} and None not in names:
            return [values[name] for name in names]
        if len(values) == len(names) == 1:
            return list(values.values())
    elif isinstance(values, tuple | list):
        if len(values) == len(names):
            return list(values)
    elif len(names) == 1 or argument == "sample_weight":
        return [values] * len(names)
    raise ValueError(
        f"{argument} must have the structure of the model's outputs, {list(names)}. Received the structure: "
        f"{_structure(values)}"
    )


def per_output(given: Any, outputs: Sequence[Output], argument: str, *, default: Any) -> list[Any]:
    """Spread what `compile` was given over the outputs.

    Args:
        given: One entry for all, a list or tuple with one per output, or a dict by output name.
        outputs: The outputs.
        argument: The argument's name, for the error.
        default: What an output that a dict leaves out gets.

    Returns:
        One entry per output.

    Raises:
        ValueError: If the entries do not fit the outputs.
    """
    names = [output.name for output in outputs]
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"`{argument}` names outputs that the model does not have: {unknown}. It has {names}.")
        return [given.get(name, default) for name in names]
    if isinstance(given, tuple | list):
        if len(given) != len(outputs):
            raise ValueError(
                f"`{argument}` needs one entry per output, {len(outputs)} of them ({names}). "
                f"Received: {argument}={given}"
            )
        return list(given)
    return [given] * len(outputs)


def target_kind(output: Output) -> Kind:
    """Say what kind of classification an output and its target look like, as Keras decides it.

    Args:
        output: The output's shapes.
    """
    target = output.target or output.prediction
    if output.prediction[-1] == 1:
        return "binary"
    if len(target) < len(output.prediction) or (target[-1] == 1 and output.prediction[-1] > 1):
        return "sparse"
    return "categorical"


def broadcast_rows(rows: Any, like: Any) -> Any:
    """Reshape one number per row so that it multiplies an array with rows first.

    Args:
        rows: [B].
        like: An array [B, ...].
    """
    return rows.reshape(rows.shape + (1,) * (like.ndim - 1))


def _structure(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _structure(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return [_structure(value) for value in tree]
    return "*"

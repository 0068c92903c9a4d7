"""Outputs of a module as a flat list, and what `compile` gives per output.

Entry points: `flatten_outputs`, `per_output`, `align_targets`. An output is known by its path in the structure that a
module returns, such as `trunk/head` or `0/1`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Kind = Literal["binary", "sparse", "categorical"]
# Keys of dicts and numbers in tuples and lists, from the outside in.
Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a module.

    Attributes:
        path: Where it is in the module's outputs; empty for a lone array.
        name: Its path as text; None for a lone array and for the entries of one flat tuple or list, as in Keras.
        prediction: Shape of the module's output, rows first.
        row: Targets of one row that it is compared with, or None when there are none.
    """

    path: Path
    name: str | None
    prediction: tuple[int, ...]
    row: Any = None

    @property
    def target(self) -> tuple[int, ...] | None:
        """Shape of the targets, rows first."""
        return None if self.row is None else tuple(np.shape(self.row))


def output_names(paths: Sequence[Path]) -> list[str | None]:
    """Name outputs by their paths.

    Args:
        paths: Paths of all outputs.

    Returns:
        Paths as text; None for each where they say no more than a position.
    """
    if all(len(path) < 2 and not any(isinstance(key, str) for key in path) for path in paths):
        return [None] * len(paths)
    return [_text(path) for path in paths]


def _text(path: Path) -> str:
    return "/".join(map(str, path))


def flatten_outputs(tree: Any) -> tuple[list[Path], list[Any]]:
    """List a module's outputs.

    Args:
        tree: An array, or dicts, tuples and lists of arrays, nested at will.

    Returns:
        Paths and arrays; keys of a dict in sorted order.

    Raises:
        ValueError: If two outputs have the same path as text.
    """
    found = list(_leaves(tree, ()))
    names = [_text(path) for path, _ in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Every output needs a path of its own, and {twice} stands for several. Rename a key.")
    return [path for path, _ in found], [leaf for _, leaf in found]


def _leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from _leaves(tree[key], (*path, str(key)))
    elif isinstance(tree, tuple | list):
        for number, part in enumerate(tree):
            yield from _leaves(part, (*path, number))
    else:
        yield path, tree


def align_targets(values: Any, paths: Sequence[Path], argument: str) -> list[Any]:
    """List targets, or sample weights, in the order of the outputs.

    Args:
        values: Arrays in the structure of the outputs, a dict by output name, or a list in the order of the outputs of
            one flat dict; dicts may leave outputs out. None is None for every output.
        paths: Paths of the outputs.
        argument: What the values are, for the error.

    Returns:
        One entry per output. One array of sample weights serves every output.

    Raises:
        ValueError: If the structure does not fit the outputs.
    """
    if values is None:
        return [None] * len(paths)
    found = {_text(path): leaf for path, leaf in _leaves(values, ())}
    names = [_text(path) for path in paths]
    if not isinstance(values, Mapping | tuple | list):
        if len(paths) == 1 or argument == "sample_weight":
            return [values] * len(paths)
    elif len(found) == len(paths) == 1:
        return list(found.values())
    elif set(found) == set(names) or (isinstance(values, Mapping) and found and set(found) < set(names)):
        return [found.get(name) for name in names]
    elif _is_flat_list(values) and len(values) == len(paths) and all(len(path) == 1 for path in paths):
        return list(values)  # by position, where the outputs are one flat dict
    raise ValueError(
        f"{argument} must have the structure of the model's outputs, {output_names(paths)}. Received the structure: "
        f"{_structure(values)}"
    )


def _is_flat_list(values: Any) -> bool:
    return isinstance(values, tuple | list) and not any(isinstance(v, Mapping | tuple | list) for v in values)


def per_output(given: Any, outputs: Sequence[Output], argument: str) -> list[Any]:
    """Spread what `compile` was given over the outputs.

    Args:
        given: One entry for all; entries in the structure of the outputs, where one may stand for a whole branch; a
            list or tuple with one per output; or a dict by output name. Dicts may leave outputs out.
        outputs: The outputs.
        argument: The argument's name, for the error.

    Returns:
        One entry per output; None for those left out.

    Raises:
        ValueError: If the entries do not fit the outputs.
    """
    if len(outputs) == 1 and len(given if isinstance(given, list | tuple) else ()) == 1:
        given = given[0]
    if len(outputs) == 1 and not outputs[0].path and isinstance(given, Mapping) and len(given) == 1:
        (given,) = given.values()  # a lone array has no name to compare with
    found: dict[Path, Any] = {}
    _spread(given, [output.path for output in outputs], 0, argument, found)
    return [found.get(output.path) for output in outputs]


def _spread(given: Any, paths: Sequence[Path], depth: int, argument: str, found: dict[Path, Any]) -> None:
    """Enter what `given` says of the outputs below one node, whose paths agree up to `depth`."""
    if len(paths) == 1 and len(paths[0]) == depth:
        found[paths[0]] = given
        return
    branches: dict[str | int, list[Path]] = {}
    for path in paths:
        branches.setdefault(path[depth], []).append(path)
    if isinstance(given, Mapping):
        for key, item in given.items():
            inside = [path for path in paths if _length(path[depth:], str(key))]
            if not inside:
                raise ValueError(
                    f"`{argument}` names outputs that the model does not have: {key!r}. It has "
                    f"{[_text(path) for path in paths]}. Received: {argument}={given}"
                )
            _spread(item, inside, depth + _length(inside[0][depth:], str(key)), argument, found)
    elif not isinstance(given, tuple | list):
        found.update(dict.fromkeys(paths, given))
    elif len(given) == len(branches) and all(isinstance(key, int) for key in branches):
        for item, inside in zip(given, branches.values(), strict=True):
            _spread(item, inside, depth + 1, argument, found)
    elif len(given) == len(paths):
        found.update(zip(paths, given, strict=True))
    else:
        raise ValueError(
            f"`{argument}` needs one entry per output, {len(paths)} of them "
            f"({[_text(path) for path in paths]}). Received: {argument}={given}"
        )


def _length(path: Path, key: str) -> int:
    """Count the parts of a path that a key, which may itself be a path, goes through; 0 where it goes elsewhere."""
    return next((n for n in range(1, len(path) + 1) if _text(path[:n]) == key), 0)


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

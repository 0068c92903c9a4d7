"""Host arrays of what a user holds: x, y and weights by name, in the precision that devices compute in.

Entry points: `keras_arrays`, `is_array_tree`, `count_rows`, `split_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def keras_arrays(
    x: Any, y: Any = None, sample_weight: Any = None, class_weight: Mapping[Any, float] | None = None
) -> dict[str, Any]:
    """Turn x, y and weights into host arrays by name.

    Args:
        x: Arrays.
        y: Targets, or None.
        sample_weight: Weights, or None.
        class_weight: Weight by class, or None.

    Raises:
        ValueError: If weights are given twice, or `class_weight` does not fit y.
    """
    arrays = {"x": host_tree(x)}
    if y is not None:
        arrays["y"] = host_tree(y)
    if class_weight is not None:
        if sample_weight is not None:
            raise ValueError("You cannot `class_weight` and `sample_weight` at the same time.")
        arrays["sample_weight"] = class_weights(arrays.get("y"), class_weight)
    if sample_weight is not None:
        arrays["sample_weight"] = host_tree(sample_weight)
    return arrays


def class_weights(y: Any, class_weight: Mapping[Any, float]) -> np.ndarray:
    """Look up the weight of each row's class.

    Args:
        y: Class numbers [rows] or [rows, 1], or one-hot [rows, classes].
        class_weight: Weight by class number; a missing class weighs 1.

    Returns:
        float32 [rows].

    Raises:
        ValueError: If y is missing or has several outputs, or `class_weight` is no mapping.
    """
    if not isinstance(class_weight, Mapping):
        raise ValueError(f"`class_weight` maps class numbers to weights. Received: class_weight={class_weight!r}")
    if not isinstance(y, np.ndarray):
        raise ValueError("`class_weight` needs y with a single output.")
    classes = y.argmax(axis=-1) if y.ndim > 1 and y.shape[-1] > 1 else y.reshape(len(y))
    table = {int(key): float(value) for key, value in class_weight.items()}
    return np.asarray([table.get(int(number), 1.0) for number in np.round(classes)], np.float32)


def split_rows(arrays: Mapping[str, Any], fraction: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cut the last part of the rows off for validation, before any shuffling.

    Args:
        arrays: Trees of arrays with one number of rows.
        fraction: Part to cut off, between 0 and 1.

    Returns:
        Training and validation arrays.

    Raises:
        ValueError: If the fraction leaves one of them empty.
    """
    rows = count_rows(arrays)
    at = math.floor(rows * (1.0 - fraction))
    if not 0 < fraction < 1 or at in (0, rows):
        raise ValueError(
            f"validation_split must be between 0 and 1 and leave rows on both sides of {rows} rows. "
            f"Received: validation_split={fraction}"
        )
    return (
        jax.tree.map(lambda leaf: leaf[:at], dict(arrays)),
        jax.tree.map(lambda leaf: leaf[at:], dict(arrays)),
    )


def count_rows(arrays: Mapping[str, Any]) -> int:
    """Count the rows of arrays that belong together.

    Args:
        arrays: Trees of arrays.

    Raises:
        ValueError: If there are no rows, arrays differ, or one has no dimension of rows.
    """
    lone = [name for name, tree in arrays.items() if any(leaf.ndim == 0 for leaf in jax.tree.leaves(tree))]
    if lone:
        raise ValueError(
            f"Arrays need a dimension of rows, and {lone} hold lone numbers. Turn lists of numbers into one array: "
            "numpy.asarray(y)."
        )
    sizes = {name: [leaf.shape[0] for leaf in jax.tree.leaves(tree)] for name, tree in arrays.items()}
    found = {size for values in sizes.values() for size in values}
    if len(found) > 1:
        text = ", ".join(f"'{name}' sizes: {', '.join(map(str, values))}" for name, values in sizes.items())
        raise ValueError(
            f"Data cardinality is ambiguous. Make sure all arrays contain the same number of samples. {text}"
        )
    if not found or found == {0}:
        raise ValueError("There is no data: the arrays have no rows.")
    return found.pop()


def is_array_tree(x: Any) -> bool:
    """Say whether data is an array, or dicts, tuples and lists of arrays.

    Args:
        x: Anything.
    """
    if isinstance(x, Mapping):
        return bool(x) and all(is_array_tree(value) for value in x.values())
    if isinstance(x, tuple | list):
        return bool(x) and all(is_array_tree(value) for value in x)
    return hasattr(x, "__array__") and hasattr(x, "shape")


def host_tree(tree: Any) -> Any:
    """Turn a tree of arrays into NumPy arrays in the precision that devices compute in.

    Args:
        tree: Arrays of NumPy, JAX, pandas or others with `__array__`.
    """

    def convert(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if array.dtype.kind in "OUS":
            raise ValueError(f"Arrays must hold numbers. Received: dtype={array.dtype}")
        narrow = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}.get(array.dtype.name)
        return array if narrow is None else array.astype(narrow)

    if isinstance(tree, Mapping):
        return {key: host_tree(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return list(map(host_tree, tree)) if isinstance(tree, list) else tuple(map(host_tree, tree))
    return convert(tree)

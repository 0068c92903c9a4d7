"""Path names and globs over trees of arrays.

A leaf is named by its path, `params/layers_3/mlp/gate_proj/kernel`; entry point: `named_leaves`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from dew.arrays import PyTree

__all__ = ["closest", "map_named", "matches", "named_leaves", "nested", "path_name"]

IsLeaf = Callable[[Any], bool]


def path_name(keypath: Sequence[Any]) -> str:
    """Join a JAX key path into one slash-separated name.

    Args:
        keypath: Keys as `jax.tree_util.tree_flatten_with_path` gives them.

    Returns:
        For example `params/layers_3/mlp/gate_proj/kernel`; the empty string for the root.
    """
    return "/".join(_key_name(key) for key in keypath)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def named_leaves(tree: PyTree, is_leaf: IsLeaf | None = None) -> dict[str, Any]:
    """List the leaves of a tree by path, in the tree's own order.

    Args:
        tree: Any tree.
        is_leaf: Where to stop early, as in `jax.tree.leaves`.

    Returns:
        Path to leaf.

    Raises:
        ValueError: If two leaves have one path, as `{"a/b": x}` beside `{"a": {"b": y}}` would.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    leaves = {path_name(keypath): leaf for keypath, leaf in flat}
    if len(leaves) != len(flat):
        names = [path_name(keypath) for keypath, _ in flat]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"Two leaves of one tree go by one path: {twice}. Rename one; a key must not contain '/'.")
    return leaves


def map_named(function: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf | None = None) -> PyTree:
    """Map a function of (path, leaf, *matching leaves) over a tree.

    Args:
        function: Called as `function(path, leaf, *leaves_of_rest)`.
        tree: The tree whose structure the result takes.
        *rest: Trees that have `tree`'s structure as a prefix of their own.
        is_leaf: Where to stop early, as in `jax.tree.map`.

    Returns:
        A tree of what `function` returned.
    """
    return jax.tree_util.tree_map_with_path(
        lambda keypath, leaf, *others: function(path_name(keypath), leaf, *others), tree, *rest, is_leaf=is_leaf
    )


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Build nested dicts from path names: the inverse of `named_leaves` on a tree of dicts.

    Args:
        leaves: Path to leaf.

    Returns:
        Dicts nested by the parts of each path.

    Raises:
        ValueError: If one path is a leaf and also the parent of another.
    """
    tree: dict[str, Any] = {}
    parents: set[int] = {id(tree)}
    for path, leaf in leaves.items():
        *above, last = path.split("/")
        node = tree
        for part in above:
            if part not in node:
                node[part] = {}
                parents.add(id(node[part]))
            node = node[part]
            if id(node) not in parents:
                raise ValueError(f"Path {path!r} goes through {part!r}, which is a leaf already. Rename one of them.")
        if last in node:
            raise ValueError(f"Path {path!r} is a leaf and the parent of other leaves. Rename one of them.")
        node[last] = leaf
    return tree


def matches(path: str, patterns: str | Iterable[str]) -> bool:
    """Say whether a whole path matches one of the patterns, as `fnmatch` reads them (`*` crosses slashes).

    Args:
        path: A path name.
        patterns: One glob or several.
    """
    if isinstance(patterns, str):
        patterns = (patterns,)
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def closest(name: str, choices: Iterable[str]) -> str | None:
    """Find the choice a person most likely meant, for "did you mean" in errors.

    Args:
        name: What was given.
        choices: What is known.

    Returns:
        The closest choice, or None when nothing is close.
    """
    found = difflib.get_close_matches(str(name), [str(choice) for choice in choices], n=1)
    return found[0] if found else None

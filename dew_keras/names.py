"""Names as Keras shows them: snake case, unique log keys, and errors for names nobody knows.

Entry points: `unknown_name`, `display_name`, `UniqueNames`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from dew.tree import closest


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """Build the error for a name that matches nothing.

    Args:
        kind: What was named: "optimizer", "loss", "metric".
        name: The name that was given.
        known: The names that work.

    Returns:
        The error to raise.
    """
    known = sorted(set(known))
    near = closest(str(name).lower(), known)
    hint = f"Did you mean {near!r}? " if near else ""
    return ValueError(f"Unknown {kind} name. {hint}Known names: {', '.join(known)}. Received: {kind}={name!r}")


def snake_case(name: str) -> str:
    """Write a class name as Keras names an instance: `MeanSquaredError` becomes `mean_squared_error`.

    Args:
        name: A class name.
    """
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def display_name(thing: Any) -> str:
    """Name a loss or metric in logs.

    Args:
        thing: A string, which is shown as given, a Keras object, a class, or a function.
    """
    if isinstance(thing, str):
        return thing
    if isinstance(thing, type):
        return snake_case(thing.__name__)
    if getattr(thing, "name", None):
        return str(thing.name)
    return snake_case(getattr(thing, "__name__", None) or type(thing).__name__)


class UniqueNames:
    """Hand out log keys; the second `mae` becomes `mae_1`, as in Keras."""

    def __init__(self) -> None:
        self._uses: dict[str, int] = {}

    def take(self, name: str, *, again: str | None = None) -> str:
        """Return `name`, or a free variation of it.

        Args:
            name: The wanted key.
            again: The key to try when `name` is taken: a weighted metric tries `weighted_<name>`.
        """
        if name in self._uses and again is not None:
            name = again
        count = self._uses.get(name, 0)
        self._uses[name] = count + 1
        return f"{name}_{count}" if count else name

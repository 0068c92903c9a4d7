"""Tensor names of other exports: the same weights under a prefix more, or one less.

Entry point: `canonical_names`. A language model inside a larger one, a wrapped or compiled module, and a base model
saved without its head are all the model whose config they carry; only their names differ.
"""

from collections.abc import Callable, Collection, Iterable

import numpy as np

from dew.pretrained.source import CheckpointError, TensorInfo, TensorSource

# What wrappers put before every name.
WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")
# Base models whose own exports leave their prefix out.
BASES = ("model.", "transformer.")
# Where larger models keep a language model: whole (`language_model.model.*`), or its base alone.
_WHOLE, _BASE_ONLY = "language_model.", "model.language_model."


class _Renamed:
    """A source under other names."""

    def __init__(self, source: TensorSource, stored: dict[str, str]):
        self._source, self._stored = source, stored
        self.nbytes = source.nbytes

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def info(self, name: str) -> TensorInfo:
        return self._source.info(self._stored[name])

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._source.read(self._stored[name], index)

    def release(self, name: str) -> None:
        self._source.release(self._stored[name])

    def close(self) -> None:
        self._source.close()


def canonical_names(source: TensorSource, wanted: Collection[str], where: object) -> TensorSource:
    """Give the tensors of a checkpoint the names of its family.

    Args:
        source: The checkpoint.
        wanted: Names of the family that the model reads.
        where: The checkpoint, for errors.

    Returns:
        The source as it is, when it has the wanted names or when no rule gives them; else a view under them.

    Raises:
        CheckpointError: If a rule gives two tensors one name.
    """
    names = list(source.names())
    if not set(wanted) <= set(names):
        for rule in _rules(wanted):
            stored: dict[str, str] = {}
            for name in names:
                renamed = rule(name)
                if renamed in stored:
                    raise CheckpointError(f"{where}: both {stored[renamed]!r} and {name!r} would be {renamed!r}.")
                stored[renamed] = name
            if set(wanted) <= stored.keys():
                return _Renamed(source, stored)
    return source


def _rules(wanted: Collection[str]) -> list[Callable[[str], str]]:
    rules: list[Callable[[str], str]] = [_without(prefix) for prefix in (*WRAPPERS, _WHOLE)]
    for base in BASES:
        members = {name.removeprefix(base) for name in wanted if name.startswith(base)}
        if members:
            rules.append(_moved(_BASE_ONLY, base))
            rules.append(_moved(f"{_WHOLE}{base}", base))
            rules.append(_prefixed(base, {member.split(".", 1)[0] for member in members}))
    return rules


def _without(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)


def _moved(old: str, new: str) -> Callable[[str], str]:
    return lambda name: new + name.removeprefix(old) if name.startswith(old) else name


def _prefixed(base: str, first_words: set[str]) -> Callable[[str], str]:
    return lambda name: base + name if name.split(".", 1)[0] in first_words else name

"""Weights in files: a Hugging Face directory for language models, `.weights.h5` for any module.

Entry points: `save_model`, `save_weights`, `load_weights`. A weights file holds the run too: optimizer state,
counters, random key, place in the data. What is interrupted leaves the old file whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dew.placement.processes import write_once
from dew.pretrained import save_pretrained
from dew.tree import closest
from dew_keras.archive import SUFFIX, Archive
from dew_keras.replacing import check_replaceable, replacing
from dew_keras.run_state import SavedRun, read_run
from dew_keras.weights_file import ArrayFile, Contents, write_hdf5

WEIGHTS_SUFFIX, SHARDED_SUFFIX = ".weights.h5", ".weights.json"


def is_archive(filepath: Any, zipped: bool | None) -> bool:
    """Say whether `save` writes a `.keras` file, else a Hugging Face directory.

    Args:
        filepath: The path.
        zipped: As `Model.save`.

    Raises:
        ValueError: If the path names another format, or `zipped` contradicts it.
    """
    path = Path(filepath)
    archive = path.suffix == SUFFIX
    is_folder = path.is_dir() or str(filepath).endswith(("/", os.sep))
    if not archive and not is_folder and re.fullmatch(r"\.[A-Za-z]\w*", path.suffix):
        raise ValueError(
            f"save() writes a `{SUFFIX}` file, which load_model reads, or, for a language model, a Hugging Face "
            f"directory under a path without an extension; weights alone are save_weights('name{WEIGHTS_SUFFIX}'). "
            f"Received: filepath={str(filepath)!r}"
        )
    if zipped is not None and bool(zipped) is not archive:
        raise ValueError(
            f"A `{SUFFIX}` file is a zip and a Hugging Face directory is none; leave zipped out. "
            f"Received: zipped={zipped!r}, filepath={str(filepath)!r}"
        )
    return archive


def save_model(
    filepath: Any,
    *,
    module: Any,
    variables: Any,
    config: Mapping[str, Any] | None,
    tokenizer: Any,
    generation_config: Mapping[str, Any] | None,
    is_language_model: bool,
    overwrite: bool,
) -> Path:
    """Write a language model as a Hugging Face checkpoint directory.

    Args:
        filepath: The directory.
        module: The model.
        variables: Its variables.
        config: Config it was loaded with, or None.
        tokenizer: Its tokenizer, or None.
        generation_config: Defaults for generation, or None.
        is_language_model: Whether the module is a language model.
        overwrite: Whether an earlier checkpoint there may be replaced.

    Returns:
        The directory.

    Raises:
        ValueError: If the module is no language model.
        FileExistsError: If something is there and may not be replaced.
    """
    path = Path(filepath)
    if not is_language_model:
        raise ValueError(
            f"{type(module).__name__} has no Hugging Face checkpoint format. Use save('name{SUFFIX}') for the whole "
            f"model, or save_weights('name{WEIGHTS_SUFFIX}'). Received: filepath={str(filepath)!r}"
        )
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists. Pass overwrite=True to replace it, or another path.")
    return save_pretrained(path, module, variables, config, tokenizer, generation_config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a weights file gave.

    Attributes:
        variables: Host arrays by per-layer name.
        run: The run whose weights they are, or None.
        skipped: Variables of the model that were left out.
    """

    variables: dict[str, np.ndarray]
    run: SavedRun | None
    skipped: frozenset[str]


def save_weights(filepath: Any, contents: Contents, *, overwrite: bool = True) -> None:
    """Write weights, and the run they belong to, into one file.

    Args:
        filepath: A path that ends in `.weights.h5`.
        contents: What to write.
        overwrite: Whether an earlier file may be replaced.

    Raises:
        ValueError: If the path has another ending.
        FileExistsError: If the file is there and may not be replaced.
        OSError: If it cannot be written; an earlier file stays.
    """
    path = weights_path(filepath)
    check_replaceable(path, overwrite=overwrite)

    def write(arrays: Iterator[tuple[str, np.ndarray]]) -> None:
        with replacing(path, contents.nbytes) as unfinished:
            write_hdf5(unfinished, arrays, contents.facts)

    write_once(write, contents.arrays)


def load_weights(filepath: Any, shapes: Mapping[str, Any] | None, *, skip_mismatch: bool = False) -> Loaded:
    """Read what `save_weights`, or `save` as a `.keras` file, wrote.

    Args:
        filepath: A path that ends in `.weights.h5` or `.keras`.
        shapes: Shapes and dtypes of the model's variables by per-layer name; None takes whatever the file has.
        skip_mismatch: Leave variables out whose shape differs or that one side lacks.

    Returns:
        What the file holds; nothing was assigned yet.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If names or shapes differ.
        DamagedFileError: If the file cannot be read as it was written.
    """
    with _opened(Path(filepath)) as file:
        return read_weights(file, shapes, skip_mismatch=skip_mismatch)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[ArrayFile]:
    if path.suffix == SUFFIX:
        with Archive(path) as archive, archive.weights() as entry, ArrayFile(entry, str(path)) as file:
            yield file
        return
    if not weights_path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    with ArrayFile(path, str(path)) as file:
        yield file


def read_weights(file: ArrayFile, shapes: Mapping[str, Any] | None, *, skip_mismatch: bool) -> Loaded:
    """Read an open weights file; see `load_weights`.

    Args:
        file: The file.
        shapes: As `load_weights`.
        skip_mismatch: As `load_weights`.
    """
    stored = {name: file.shape(f"variables/{name}") for name in file.names("variables")}
    wanted = stored if shapes is None else {name: tuple(leaf.shape) for name, leaf in shapes.items()}
    if not skip_mismatch:
        _check_shapes(file.title, stored, wanted)
    found = [name for name, shape in wanted.items() if stored.get(name) == shape]
    variables = {name: file.read(f"variables/{name}") for name in found}
    return Loaded(variables=variables, run=read_run(file), skipped=frozenset(wanted) - frozenset(found))


def _check_shapes(title: str, stored: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    for name, shape in shapes.items():
        if name not in stored:
            near = closest(name, stored)
            hint = f" The nearest one there is {near!r}." if near else ""
            raise ValueError(f"{title} lacks the variable {name!r}, which the module has.{hint}")
        if stored[name] != shape:
            raise ValueError(f"{title} holds {name!r} with shape {stored[name]}; the module has {shape}.")
    unknown = [name for name in stored if name not in shapes]
    if unknown:
        near = closest(unknown[0], shapes)
        hint = f" The nearest one here is {near!r}." if near else ""
        raise ValueError(f"{title} holds {len(unknown)} variables that the module does not have: {unknown[:5]}.{hint}")


def weights_path(filepath: Any) -> Path:
    """Check the name of a weights file.

    Args:
        filepath: The path.

    Raises:
        ValueError: If it has another ending.
    """
    path = Path(filepath)
    if path.name.endswith(SHARDED_SUFFIX):
        raise ValueError(
            f"Weights in several files (`{SHARDED_SUFFIX}`) are neither written nor read: one file of any size is "
            f"written array by array. Use a path that ends in `{WEIGHTS_SUFFIX}`. Received: filepath={str(filepath)!r}"
        )
    if not path.name.endswith(WEIGHTS_SUFFIX):
        raise ValueError(f"The filename must end in `{WEIGHTS_SUFFIX}`. Received: filepath={str(filepath)!r}")
    return path

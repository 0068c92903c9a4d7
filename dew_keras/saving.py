"""Weights in files: a Hugging Face directory for language models, `.weights.h5` for any module.

Entry points: `save_model`, `save_weights`, `load_weights`. A weights file holds the run too: optimizer state,
counters, random key, place in the data. What is interrupted leaves the old file whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dew.placement.processes import write_once
from dew.pretrained import save_pretrained
from dew.tree import closest
from dew_keras.archive import open_weights_entry
from dew_keras.replacing import check_replaceable, replacing
from dew_keras.run_state import SavedRun, read_run
from dew_keras.weights_file import ArrayFile, write_arrays

WEIGHTS_SUFFIX = ".weights.h5"


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
        ValueError: If the path names a file format, or the module is no language model.
        FileExistsError: If something is there and may not be replaced.
    """
    path = Path(filepath)
    if path.name.endswith((".keras", ".h5", ".hdf5")):
        raise ValueError(
            "save() writes a Hugging Face checkpoint directory: give a path without a file extension, or use "
            f"save_weights('name{WEIGHTS_SUFFIX}'). Received: filepath={str(filepath)!r}"
        )
    if not is_language_model:
        raise ValueError(
            f"{type(module).__name__} has no Hugging Face checkpoint format. Use save_weights('name{WEIGHTS_SUFFIX}'), "
            "and build the module again to load it."
        )
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists. Pass overwrite=True to replace it, or another path.")
    return save_pretrained(path, module, variables, config, tokenizer, generation_config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """What goes into a weights file.

    Attributes:
        arrays: Names and host arrays, one after another; all processes consume them together.
        facts: JSON values.
        nbytes: Bytes of all arrays.
    """

    arrays: Iterator[tuple[str, np.ndarray]]
    facts: Mapping[str, Any]
    nbytes: int


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


def write_hdf5(path: Path, arrays: Iterator[tuple[str, np.ndarray]], facts: Mapping[str, Any]) -> None:
    """Write a new HDF5 file and wait until it is on the disk.

    Args:
        path: The file.
        arrays: Names and arrays.
        facts: JSON values.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        with h5py.File(path, "w") as file:
            write_arrays(file, arrays, facts)
    except RuntimeError as error:  # what HDF5 makes of a disk that fills while it closes a file
        raise OSError(errno.EIO, str(error)) from error
    with path.open("rb") as written:
        os.fsync(written.fileno())


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
    path = Path(filepath)
    if path.suffix != ".keras":
        path = weights_path(filepath)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    with contextlib.ExitStack() as stack:
        opened: Any = path if path.suffix != ".keras" else stack.enter_context(open_weights_entry(path))
        return read_weights(stack.enter_context(ArrayFile(opened, str(path))), shapes, skip_mismatch=skip_mismatch)


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
    if not path.name.endswith(WEIGHTS_SUFFIX):
        raise ValueError(f"The filename must end in `{WEIGHTS_SUFFIX}`. Received: filepath={str(filepath)!r}")
    return path

"""Weights in files: a Hugging Face directory for language models, `.weights.h5` for any module.

Entry points: `save_model`, `save_weights`, `load_weights`. A file is written beside its place and renamed when it is
complete, so an interrupted save leaves the old one whole.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np

from dew.placement.processes import is_primary
from dew.placement.stacks import StackView
from dew.pretrained import save_pretrained
from dew.tree import closest, named_leaves, nested

WEIGHTS_SUFFIX = ".weights.h5"
FORMAT = "dew_keras.weights.1"


class DamagedFileError(ValueError, OSError):
    """A file of weights cannot be read; callbacks that keep an older one look for an OSError."""


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


def save_weights(filepath: Any, variables: Any, view: StackView, *, overwrite: bool = True) -> None:
    """Write every variable under its per-layer path into one file.

    Args:
        filepath: A path that ends in `.weights.h5`.
        variables: All collections.
        view: How the module stores layers.
        overwrite: Whether an earlier file may be replaced.

    Raises:
        ValueError: If the path has another ending.
        FileExistsError: If the file is there and may not be replaced.
    """
    path = _weights_path(filepath)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists. Pass overwrite=True to replace it, or another path.")
    leaves = named_leaves(view.unstack(variables))
    if not is_primary():
        return
    with _replacing(path) as unfinished, h5py.File(unfinished, "w") as file:
        file.attrs["format"] = FORMAT
        for name, leaf in leaves.items():
            value = np.asarray(leaf)
            # HDF5 has no bfloat16; the wider type holds its values exactly.
            file.create_dataset(name, data=value.astype(np.float32) if value.dtype.name == "bfloat16" else value)


def load_weights(filepath: Any, shapes: Any, view: StackView, *, skip_mismatch: bool = False) -> dict[str, Any]:
    """Read the variables that `save_weights` wrote.

    Args:
        filepath: A path that ends in `.weights.h5`.
        shapes: Shapes and dtypes of all collections, or the variables.
        view: How the module stores layers.
        skip_mismatch: Leave variables out whose shape differs or that one side lacks.

    Returns:
        Host arrays by the physical structure of `shapes`; where a variable is left out, the leaf of `shapes`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If names or shapes differ.
    """
    path = _weights_path(filepath)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    wanted = named_leaves(view.unstack(shapes))
    with _opened(path) as file:
        if file.attrs.get("format") != FORMAT:
            raise ValueError(f"{path} was not written by save_weights of this library.")
        stored: dict[str, Any] = {}
        file.visititems(lambda name, node: stored.update({name: node}) if isinstance(node, h5py.Dataset) else None)
        found = {name: _checked(name, leaf, stored, path, skip_mismatch=skip_mismatch) for name, leaf in wanted.items()}
        unknown = [name for name in stored if name not in wanted]
        if unknown and not skip_mismatch:
            near = closest(unknown[0], wanted)
            hint = f" The nearest one here is {near!r}." if near else ""
            raise ValueError(
                f"{path} holds {len(unknown)} variables that the module does not have: {unknown[:5]}.{hint}"
            )
    return view.stack(nested(found))


def _opened(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DamagedFileError(f"{path} is damaged: {error}. Save the weights again.") from error


def _checked(name: str, leaf: Any, stored: Mapping[str, Any], path: Path, *, skip_mismatch: bool) -> Any:
    value = stored.get(name)
    if value is not None and value.shape == tuple(leaf.shape):
        return value[()].astype(leaf.dtype)
    if skip_mismatch and isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if value is None:
        raise ValueError(f"{path} lacks the variable {name!r}, which the module has.")
    raise ValueError(f"{path} holds {name!r} with shape {value.shape}; the module has {tuple(leaf.shape)}.")


def _weights_path(filepath: Any) -> Path:
    path = Path(filepath)
    if not path.name.endswith(WEIGHTS_SUFFIX):
        raise ValueError(f"The filename must end in `{WEIGHTS_SUFFIX}`. Received: filepath={str(filepath)!r}")
    return path


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a path beside the file, and move it into place when nothing went wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        # mkstemp makes private files; the saved one gets the permissions of any other new file.
        mask = os.umask(0)
        os.umask(mask)
        unfinished.chmod(0o666 & ~mask)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)

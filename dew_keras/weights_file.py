"""The inside of a weights file: named arrays in HDF5, written as they are and read with suspicion.

Entry points: `write_hdf5`, `ArrayFile`. A file may come from anybody: only plain arrays whose bytes are all there
are read, so no size in a header can ask for more memory than the file is long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import jax.numpy as jnp
import numpy as np

FORMAT = "dew_keras.weights.2"
# Dtypes that HDF5 does not have, kept as their bits.
BIT_DTYPES = {name: np.dtype(getattr(jnp, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
MAX_FACTS = 2**15  # characters; HDF5 keeps attributes of up to 64 KiB


class DamagedFileError(ValueError, OSError):
    """A file that cannot be read as it was written; an OSError too, which callbacks that keep two copies wait for."""


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
            _write_arrays(file, arrays, facts)
    except RuntimeError as error:  # what HDF5 makes of a disk that fills while it closes a file
        raise OSError(errno.EIO, str(error)) from error
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _write_arrays(file: h5py.File, arrays: Iterator[tuple[str, np.ndarray]], facts: Mapping[str, Any]) -> None:
    for name, value in arrays:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"A weights file cannot hold the name {name!r}: a part of it is empty or made of dots.")
        if value.dtype.kind != "V":
            file.create_dataset(name, data=value)
            continue
        if value.dtype.name not in BIT_DTYPES:
            raise ValueError(f"A weights file cannot hold the dtype {value.dtype.name} of {name!r}.")
        dataset = file.create_dataset(name, data=np.asarray(value, order="C").view(f"u{value.dtype.itemsize}"))
        dataset.attrs["dtype"] = value.dtype.name
    file.attrs["facts"] = json.dumps(facts)
    file.attrs["format"] = FORMAT


class ArrayFile:
    """An open weights file.

    Args:
        file: Path or binary file.
        title: What errors call it.

    Raises:
        DamagedFileError: If it is no HDF5 file, or not all of one.
        ValueError: If this library did not write it.
    """

    def __init__(self, file: Any, title: str) -> None:
        self.title = title
        try:
            self._file = h5py.File(file, "r")
        except OSError as error:
            raise DamagedFileError(f"{title} is damaged: {error}. Save the weights again.") from error
        try:
            with self._reading():
                self._check_format()
                self._datasets: dict[str, h5py.Dataset] = {}
                self._file.visititems(self._note)  # follows no soft and no external links
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ArrayFile:
        """Return the file."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._file.close()

    def _note(self, name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            self._datasets[name] = node

    def _check_format(self) -> None:
        found = self._file.attrs.get("format")
        if found == FORMAT:
            return
        if isinstance(found, str) and found.startswith("dew_keras.weights."):
            raise ValueError(
                f"{self.title} has the format {found!r}; this version reads {FORMAT!r}. Load it with the version that "
                "wrote it."
            )
        if {"layers", "vars", "optimizer", "_layer_checkpoint_dependencies"} & set(self._file):
            raise ValueError(
                f"{self.title} was written by Keras for Keras layers, whose names say nothing about a Flax module. "
                "Load it with Keras and pass the arrays to set_weights()."
            )
        raise ValueError(f"{self.title} was not written by save_weights of this library.")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, KeyError) as error:
            if isinstance(error, DamagedFileError):
                raise
            raise DamagedFileError(f"{self.title} is damaged: {error}. Save the weights again.") from error

    def facts(self) -> dict[str, Any]:
        """Read the facts.

        Raises:
            DamagedFileError: If they are no JSON object.
        """
        with self._reading():
            text = self._file.attrs.get("facts")
        try:
            if not isinstance(text, str) or len(text) > MAX_FACTS:
                raise ValueError("its facts are no short text")
            facts = json.loads(text)
            if not isinstance(facts, dict):
                raise ValueError("its facts are no JSON object")
        except ValueError as error:
            raise DamagedFileError(f"{self.title} is damaged: {error}.") from error
        return facts

    def names(self, group: str) -> list[str]:
        """List the arrays below a group, by the names they have there.

        Args:
            group: Name of a top group.
        """
        return [name[len(group) + 1 :] for name in self._datasets if name.startswith(f"{group}/")]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array.

        Args:
            name: Its full name.
        """
        return tuple(self._datasets[name].shape or ())

    def read(self, name: str) -> np.ndarray:
        """Read one array.

        Args:
            name: Its full name.

        Raises:
            DamagedFileError: If its bytes are not all in the file, or it is no array of numbers.
        """
        dataset = self._datasets[name]
        with self._reading():
            stored = dataset.attrs.get("dtype")
            size = math.prod(dataset.shape or ()) * dataset.dtype.itemsize
            is_plain = dataset.chunks is None and not dataset.external and not dataset.is_virtual
            if dataset.dtype.kind not in "fiubc" or not is_plain or dataset.id.get_storage_size() != size:
                raise DamagedFileError(f"{self.title} is damaged: {name!r} is no plain array of numbers.")
            value = dataset[()]
        value = np.asarray(value)
        if stored is None:
            return value
        dtype = BIT_DTYPES.get(str(stored))
        if dtype is None or value.dtype != np.dtype(f"u{dtype.itemsize}"):
            raise DamagedFileError(f"{self.title} is damaged: {name!r} has the unknown dtype {str(stored)[:20]!r}.")
        return value.view(dtype)

"""`.keras` files: a zip of what a model is, how it was compiled, its tokenizer, its weights and its run.

Entry points: `write_archive`, `Archive`. A file may come from anybody: only the known entries are read, stored as they
are, so that none can be longer than the file.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import io
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dew.data.text import Tokenizer
from dew.placement.processes import write_once
from dew_keras.replacing import check_replaceable, replacing
from dew_keras.weights_file import Contents, DamagedFileError, write_hdf5

FORMAT = "dew_keras.model.1"
SUFFIX = ".keras"
CONFIG, METADATA, WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
TOKENIZER = ("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "tokenizer/chat_template.jinja")
MAX_TEXT_BYTES = 2**28  # a tokenizer of a million tokens is below 100 MB
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def write_archive(
    path: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None, contents: Contents, *, overwrite: bool
) -> None:
    """Write a `.keras` file, whole or not at all.

    Args:
        path: The file.
        config: JSON values that describe the model.
        tokenizer: Its tokenizer, or None.
        contents: Weights and run.
        overwrite: Whether an earlier file may be replaced.

    Raises:
        FileExistsError: If the file is there and may not be replaced.
        OSError: If it cannot be written; an earlier file stays.
    """
    check_replaceable(path, overwrite=overwrite)
    text = json.dumps({"format": FORMAT, **config}, indent=1)
    metadata = {
        "dew_version": importlib.metadata.version("dew"),
        "keras_version": importlib.metadata.version("keras"),
        "date_saved": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d@%H:%M:%S"),
    }

    def write(arrays: Iterator[tuple[str, np.ndarray]]) -> None:
        # Twice: the weights are written on their own before they are put into the zip.
        with (
            replacing(path, 2 * contents.nbytes) as unfinished,
            tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder,
        ):
            weights = Path(folder, WEIGHTS)
            write_hdf5(weights, arrays, contents.facts)
            with zipfile.ZipFile(unfinished, "w") as file:
                file.writestr(METADATA, json.dumps(metadata))
                file.writestr(CONFIG, text)
                file.write(weights, WEIGHTS)
                if tokenizer is not None:
                    tokenizer.save(folder)
                    for name in TOKENIZER:
                        if (part := Path(folder, Path(name).name)).is_file():
                            file.write(part, name)
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())

    write_once(write, contents.arrays)


class Archive:
    """An open `.keras` file.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is no such file.
        DamagedFileError: If it is no zip, or its entries are not those of a `.keras` file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}.")
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise DamagedFileError(f"{path} is damaged: {error}. Save the model again.") from error
        try:
            self._check_entries()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> Archive:
        """Return the file."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._zip.close()

    def _check_entries(self) -> None:
        entries = self._zip.infolist()
        names = [entry.filename for entry in entries]
        unknown = sorted(set(names) - {CONFIG, METADATA, WEIGHTS, *TOKENIZER})
        if unknown or len(set(names)) != len(names) or not {CONFIG, WEIGHTS} <= set(names):
            raise DamagedFileError(
                f"{self.path} is no .keras file of this library: it must hold {CONFIG} and {WEIGHTS} once and nothing "
                f"unknown. Received: entries={names[:8]}"
            )
        for entry in entries:
            is_stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
            if not is_stored or entry.flag_bits & 1:
                raise DamagedFileError(
                    f"{self.path} is damaged: the entry {entry.filename} is compressed or encrypted."
                )
            if entry.filename != WEIGHTS and entry.file_size > MAX_TEXT_BYTES:
                raise DamagedFileError(
                    f"{self.path} is damaged: the entry {entry.filename} has {entry.file_size} bytes; at most "
                    f"{MAX_TEXT_BYTES} are read."
                )

    def _read(self, name: str) -> bytes:
        try:
            return self._zip.read(name)
        except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
            raise DamagedFileError(f"{self.path} is damaged: {error}. Save the model again.") from error

    def config(self) -> dict[str, Any]:
        """Read what the model is.

        Raises:
            DamagedFileError: If it is no JSON.
            ValueError: If this library did not write it.
        """
        try:
            config = json.loads(self._read(CONFIG))
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(f"{self.path} is damaged: {CONFIG} is no JSON: {error}.") from error
        found = config.get("format") if isinstance(config, dict) else None
        if found is None:
            raise ValueError(
                f"{self.path} was not written by this library. A model of Keras layers is loaded by "
                "keras.saving.load_model()."
            )
        if found != FORMAT:
            raise ValueError(f"{self.path} has the format {found!r}; this version reads {FORMAT!r}.")
        return config

    def tokenizer(self) -> Tokenizer | None:
        """Read the tokenizer, or return None when the file has none."""
        names = [name for name in TOKENIZER if name in self._zip.namelist()]
        if not names:
            return None
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                Path(folder, Path(name).name).write_bytes(self._read(name))
            return Tokenizer.from_directory(folder)

    def weights(self) -> BinaryIO:
        """Open the weights inside the file, without copying them.

        Raises:
            DamagedFileError: If the entry lies outside the file.
        """
        entry = self._zip.getinfo(WEIGHTS)
        file = self.path.open("rb")
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER.size)
        is_header = len(header) == _LOCAL_HEADER.size and header.startswith(b"PK\x03\x04")
        name, extra = _LOCAL_HEADER.unpack(header)[1:] if is_header else (0, 0)
        start = entry.header_offset + _LOCAL_HEADER.size + name + extra
        if not is_header or start + entry.file_size > self.path.stat().st_size:
            file.close()
            raise DamagedFileError(f"{self.path} is damaged: {WEIGHTS} lies outside the file.")
        return io.BufferedReader(_Section(file, start, entry.file_size))


class _Section(io.RawIOBase):
    """A stretch of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._size - self._position)])  # type: ignore[attr-defined]
        self._position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

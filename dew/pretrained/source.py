"""What a checkpoint looks like to the loader: named tensors that can be read slice by slice.

Entry point: `TensorSource`, implemented by `safetensors.py` and `gguf.py`. `contained` is the one place that decides
whether a file name found inside a checkpoint may be opened.
"""

import collections
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

# A config, an index or a generation config is small; a larger one is not worth the memory of parsing it.
MAX_JSON_BYTES = 64 * 2**20
MAX_JSON_VALUES = 2_000_000
"""Values in one JSON text; each takes up to a hundred bytes of memory when it is parsed."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as it is; the text names the file, the tensor or field, and the broken rule."""


class TensorInfo(NamedTuple):
    """Shape and element type of one stored tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype


class TensorSource(Protocol):
    """Named tensors of a checkpoint, under their Hugging Face names."""

    @property
    def nbytes(self) -> int:
        """Bytes the tensors occupy on disk."""
        ...

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and the dtype that `read` returns."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read a rectangular part, one unit-step slice per dimension. It may alias the file: do not write to it."""
        ...

    def release(self, name: str) -> None:
        """Tell the system that the pages of this tensor are not needed now. Reading it again stays correct."""
        ...

    def close(self) -> None:
        """Give the files back."""
        ...


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Index that selects all of an array of this shape."""
    return tuple(slice(0, size) for size in shape)


def contained(directory: Path, name: str) -> Path:
    """Resolve a file name that a checkpoint mentions, refusing anything outside of the checkpoint.

    A snapshot in the cache of `huggingface_hub` holds links to the `blobs` folder of the same repository; those are the
    only links out of the directory that are followed.

    Args:
        directory: Folder of the checkpoint.
        name: File name, as an index or our own list gives it.

    Returns:
        The path inside `directory`. The file may not exist.

    Raises:
        CheckpointError: If the name or the link it resolves to leaves the checkpoint.
    """
    relative = Path(name)
    if not name or "\0" in name or relative.is_absolute() or ".." in relative.parts:
        raise CheckpointError(
            f"File names inside a checkpoint must stay inside its directory. Received: {name!r} in {directory}"
        )
    root = directory.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    path = directory / relative
    try:
        resolved = path.resolve()
        is_other = path.exists() and not path.is_file()
    except (OSError, RuntimeError, UnicodeError) as error:  # links in a circle, names that no system takes
        raise CheckpointError(f"{str(path)[:300]!r} cannot be a file of a checkpoint: {error}") from error
    if is_other:
        raise CheckpointError(f"{path} is not a file.")
    if not any(resolved.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(
            f"{path} is a link to {resolved}, outside of the checkpoint. Copy the file into {directory}, or load "
            f"{resolved.parent} itself."
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of bounded size.

    Raises:
        CheckpointError: If the file is too large, is not JSON, or is not an object.
    """
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; a JSON file of a checkpoint may have {MAX_JSON_BYTES}.")
    return parse_json(path.read_bytes(), path)


def parse_json(data: bytes, where: object) -> dict[str, Any]:
    """Parse a JSON object, refusing duplicate keys.

    Args:
        data: UTF-8 text.
        where: What the text belongs to, for errors.

    Raises:
        CheckpointError: If it is not valid JSON, holds too many values, names a key twice, or is not an object.
    """
    num_values = sum(data.count(mark) for mark in (b",", b"{", b"["))
    if num_values > MAX_JSON_VALUES:
        raise CheckpointError(f"{where}: holds about {num_values} values; a JSON text may hold {MAX_JSON_VALUES}.")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error}). The file is damaged; fetch it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object. Received: {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} appears twice")
    return result


def check_extents(extents: list[tuple[int, int, str]], limit: int, where: object) -> None:
    """Check that byte ranges lie inside the data and do not overlap.

    Args:
        extents: (begin, end, tensor name), bytes from the start of the data.
        limit: Bytes of data in the file.
        where: The file, for errors.

    Raises:
        CheckpointError: Naming the tensors that overlap or leave the file.
    """
    previous_end, previous_name = 0, ""
    for begin, end, name in sorted(extents):
        if begin < 0 or end < begin or end > limit:
            raise CheckpointError(
                f"{where}: tensor {name!r} claims bytes {begin} to {end}, but the file holds {limit} bytes of data. "
                "The file is truncated or damaged; fetch it again."
            )
        if begin < previous_end and end > begin:
            raise CheckpointError(f"{where}: tensors {previous_name!r} and {name!r} overlap. The file is damaged.")
        if end > begin:
            previous_end, previous_name = end, name

"""Memory-mapped reader of safetensors checkpoints, single file or sharded through an index.

Entry point: `open_safetensors`. The header is checked before any tensor is read: size, dtypes, offsets, overlaps and
duplicate names. Format: https://huggingface.co/docs/safetensors (section "Format").
"""

import math
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dew.pretrained.shards import JoinedFiles, open_shards
from dew.pretrained.source import CheckpointError, TensorInfo, check_extents, contained, parse_json

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The limit of the reference implementation.
MAX_HEADER_BYTES = 100_000_000


class SafetensorsFile:
    """One mapped file."""

    def __init__(self, path: Path):
        """Map the file and check its header.

        Raises:
            CheckpointError: If the header breaks a rule of the format.
        """
        self.path = path
        self._infos: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        self._map: mmap.mmap | None = None
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                header, data_start = _read_header(file, size, path)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        extents = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            info, begin, end = _entry(path, name, entry)
            self._infos[name], self._offsets[name] = info, data_start + begin
            extents.append((begin, end, name))
        data_bytes = size - data_start
        check_extents(extents, data_bytes, path)
        self.nbytes = sum(end - begin for begin, end, _ in extents)
        if self.nbytes != data_bytes:
            raise CheckpointError(
                f"{path}: the header describes {self.nbytes} bytes of tensors, but the file holds {data_bytes}. "
                "The file is damaged; fetch it again."
            )

    def names(self) -> Iterable[str]:
        """Names of the tensors in this file."""
        return self._infos.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape and stored dtype."""
        return self._infos[name]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """View of a part of the tensor, backed by the file."""
        assert self._map is not None, f"{self.path} is closed"
        shape, dtype = self._infos[name]
        flat = np.frombuffer(self._map, dtype, math.prod(shape), self._offsets[name])
        return flat.reshape(shape)[index]

    def release(self, name: str) -> None:
        """Drop the mapped pages of the tensor; they come back from the page cache when it is read again."""
        shape, dtype = self._infos[name]
        nbytes = math.prod(shape) * dtype.itemsize
        begin = self._offsets[name] // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes and self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, self._offsets[name] + nbytes - begin)

    def close(self) -> None:
        """Forget the mapping. The system unmaps the file when the last view of it is gone."""
        self._map = None


def open_safetensors(directory: Path) -> JoinedFiles:
    """Open the safetensors checkpoint of a directory, checking every header.

    Args:
        directory: Holds `model.safetensors`, or an index and its shards, or a single `.safetensors` file.

    Raises:
        CheckpointError: If there is no checkpoint, a shard is missing, the index and the files disagree, a name leaves
            the directory, or a header is damaged.
    """
    index_path = contained(directory, INDEX_NAME)
    if index_path.exists():
        return open_shards(directory, index_path, ".safetensors", SafetensorsFile)
    single = contained(directory, SINGLE_NAME)
    if not single.exists():
        found = sorted(directory.glob("*.safetensors"))
        if len(found) != 1:
            raise CheckpointError(
                f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}"
                + (f", and {len(found)} other .safetensors files" if found else "")
                + _other_formats(directory)
            )
        single = contained(directory, found[0].name)
    return JoinedFiles([SafetensorsFile(single)], directory)


def has_safetensors(directory: Path) -> bool:
    """Tell whether a directory holds safetensors in one of the forms that `open_safetensors` reads."""
    return next(directory.glob("*.safetensors"), None) is not None or (directory / INDEX_NAME).exists()


def _other_formats(directory: Path) -> str:
    pickled = next((path.name for path in sorted(directory.glob("*.bin"))), None)
    if pickled is not None:
        return (
            f". It holds the pickled {pickled}: convert it to safetensors, or pass allow_pickle=True to read it; no "
            "code in it is run."
        )
    return ". Only safetensors and GGUF checkpoints are read."


def _read_header(file: Any, size: int, path: Path) -> tuple[dict[str, Any], int]:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path} has {size} bytes; a safetensors file starts with an 8-byte header length.")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{path}: the header claims {length} bytes, the file has {size} and a header may have {MAX_HEADER_BYTES}. "
            "The file is truncated, damaged, or not safetensors."
        )
    return parse_json(file.read(length), path), 8 + length


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    """Check one header entry and return its info and byte range."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{path}: tensor {name!r} needs dtype, shape and data_offsets. Received: {str(entry)[:80]}"
        )
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {entry['dtype']!r}; known: {', '.join(DTYPES)}.")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for field, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 2**63 for v in values):
            raise CheckpointError(f"{path}: tensor {name!r} has {field} {str(values)[:80]}; expected whole numbers.")
    if len(shape) > 32 or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name!r} has {len(shape)} dimensions and {len(offsets)} offsets.")
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {tuple(shape)} and dtype {entry['dtype']} needs {nbytes} bytes, its "
            f"offsets span {offsets[1] - offsets[0]}. The file is damaged; fetch it again."
        )
    return TensorInfo(tuple(shape), dtype), offsets[0], offsets[1]

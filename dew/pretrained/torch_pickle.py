"""Pickled PyTorch weights (`pytorch_model.bin`), read without torch and without running what a pickle may ask for.

Entry points: `open_pickled`, `TorchFile`. `unpickle.py` interprets the pickle, which can name tensors and nothing else;
they are views of the mapped zip file. Files of torch before 1.6 are refused.
"""

import mmap
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dew.pretrained.shards import JoinedFiles, open_shards
from dew.pretrained.source import CheckpointError, TensorInfo, contained
from dew.pretrained.unpickle import StoredTensor, unpickle

PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
PICKLE_SINGLE_NAME = "pytorch_model.bin"
MAX_PICKLE_BYTES = 64 * 2**20
STORAGES: dict[str, np.dtype[Any]] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class _Record(NamedTuple):
    """Where one file of the archive lies."""

    offset: int
    nbytes: int


class TorchFile:
    """One mapped `.bin` file."""

    def __init__(self, path: Path):
        """Map the file, read its pickle and check that every tensor lies in its storage.

        Raises:
            CheckpointError: If it is no zip archive of torch, is damaged, or its pickle names anything but tensors.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(4) != b"PK\x03\x04":
                    raise CheckpointError(
                        f"{path} is not a zip archive as torch has written since 1.6. Save it again, or convert it to "
                        "safetensors."
                    )
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            records = _records(path, self._map)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        root = next((name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")), None)
        if root is None:
            raise CheckpointError(f"{path} holds no data.pkl, so torch did not write it.")
        order = records.get(f"{root}byteorder")
        if order is not None and self._bytes(order, 16) != b"little":
            raise CheckpointError(f"{path} is not stored in little-endian order; save it again on another machine.")
        self._tensors = unpickle(self._bytes(records[f"{root}data.pkl"], MAX_PICKLE_BYTES), path)
        self._records = {name.removeprefix(f"{root}data/"): record for name, record in records.items()}
        for name, tensor in self._tensors.items():
            self._check(name, tensor)
        used = {tensor.key for tensor in self._tensors.values()}
        self.nbytes = sum(self._records[key].nbytes for key in used)

    def names(self) -> Iterable[str]:
        """Names of the tensors in this file."""
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape and stored dtype."""
        tensor = self._tensors[name]
        return TensorInfo(tensor.shape, STORAGES[tensor.storage])

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """View of a part of the tensor, backed by the file."""
        assert self._map is not None, f"{self.path} is closed"
        tensor = self._tensors[name]
        dtype = STORAGES[tensor.storage]
        if 0 in tensor.shape:
            return np.empty(tensor.shape, dtype)[index]
        begin = self._records[tensor.key].offset + tensor.offset * dtype.itemsize
        flat = np.frombuffer(self._map, dtype, _span(tensor), begin)
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)[index]

    def release(self, name: str) -> None:
        """Drop the mapped pages of the tensor's storage; they come back when it is read again."""
        record = self._records[self._tensors[name].key]
        begin = record.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if record.nbytes and self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, record.offset + record.nbytes - begin)

    def close(self) -> None:
        """Forget the mapping. The system unmaps the file when the last view of it is gone."""
        self._map = None

    def _bytes(self, record: _Record, limit: int) -> bytes:
        if record.nbytes > limit:
            raise CheckpointError(
                f"{self.path} holds a record of {record.nbytes} bytes where at most {limit} are read."
            )
        assert self._map is not None
        return self._map[record.offset : record.offset + record.nbytes]

    def _check(self, name: str, tensor: StoredTensor) -> None:
        dtype = STORAGES.get(tensor.storage)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is in a {tensor.storage}; known: {', '.join(STORAGES)}."
            )
        record = self._records.get(tensor.key)
        if record is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is in storage {tensor.key!r}, which is not there.")
        end = (tensor.offset + _span(tensor)) * dtype.itemsize
        if 0 not in tensor.shape and end > record.nbytes:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} of shape {tensor.shape} ends at byte {end} of a storage of "
                f"{record.nbytes} bytes. The file is truncated or damaged; fetch it again."
            )


def open_pickled(directory: Path) -> JoinedFiles:
    """Open the pickled weights of a directory.

    Args:
        directory: Holds `pytorch_model.bin`, or an index and its shards.

    Raises:
        CheckpointError: If there are none, or one is damaged or names anything but tensors.
    """
    index_path = contained(directory, PICKLE_INDEX_NAME)
    if index_path.exists():
        return open_shards(directory, index_path, ".bin", TorchFile)
    single = contained(directory, PICKLE_SINGLE_NAME)
    if not single.exists():
        raise CheckpointError(
            f"{directory} holds no weights that are read: no safetensors, {PICKLE_SINGLE_NAME} or {PICKLE_INDEX_NAME}."
        )
    return JoinedFiles([TorchFile(single)], directory)


def _span(tensor: StoredTensor) -> int:
    """Elements of the storage from the first of a tensor to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))


def _records(path: Path, data: mmap.mmap) -> dict[str, _Record]:
    """Find the files of the archive; all of them are stored as they are."""
    found: dict[str, _Record] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, IndexError) as error:
        raise CheckpointError(f"{path} is not a readable zip archive ({error}); fetch it again.") from error
    for entry in entries:
        name = entry.filename
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or name in found:
            raise CheckpointError(
                f"{path}: the record {name!r} is compressed or appears twice, which torch does not write."
            )
        header = data[entry.header_offset : entry.header_offset + 30] if entry.header_offset >= 0 else b""
        if len(header) != 30 or not header.startswith(b"PK\x03\x04"):
            raise CheckpointError(f"{path}: the record {name!r} does not start where the archive says. Fetch it again.")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        begin = entry.header_offset + 30 + name_bytes + extra_bytes
        if begin + entry.file_size > len(data):
            raise CheckpointError(f"{path}: the record {name!r} reaches past the end of the file. Fetch it again.")
        found[name] = _Record(begin, entry.file_size)
    return found

"""Memory-mapped reader of GGUF files, dequantising only the slice that is asked for.

Entry points: `GgufFile` (metadata; needs no `gguf` package) and `GgufSource` (tensors under Hugging Face names).
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dew.pretrained.source import CheckpointError, TensorInfo, check_extents

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_METADATA_KEYS = 65_536
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
MAX_STRING_BYTES = 64 * 2**20
MAX_METADATA_BYTES = 512 * 2**20
MAX_ARRAY_ITEMS = 8_000_000
"""Of all arrays of a file together; a vocabulary of 256,000 tokens with its merges has a million."""
DEFAULT_ALIGNMENT = 32
GROUP_VALUES = 2048
"""Values of a row that is given to the package, which expands 16 rows at once: more leave the cache, fewer spend the
time on calls. Measured in ms per million values of Q4_K: 256 values 18.0, 2048 4.1, 16384 8.2."""
STRING, ARRAY = 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


class StoredTensor(NamedTuple):
    """Where a tensor lies in the file: outermost dimension first, ggml type, bytes from the start of the data."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufFile:
    """The mapped file: its metadata and the table of tensors. It stays mapped while this lives."""

    def __init__(self, path: Path):
        """Map the file and read its header.

        Raises:
            CheckpointError: If the header breaks a rule of the format.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                if self.size < 24:
                    raise CheckpointError(f"{path} has {self.size} bytes; a GGUF header has at least 24.")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        cursor = _Cursor(self._map, self.size, path)
        if cursor.bytes(4) != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not start with {MAGIC!r}.")
        version = cursor.number("<I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{path} is GGUF version {version}; versions {VERSIONS} in little-endian order are read. "
                "Convert it again."
            )
        num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_METADATA_KEYS:
            raise CheckpointError(
                f"{path} claims {num_tensors} tensors and {num_keys} metadata keys; at most {MAX_TENSORS} and "
                f"{MAX_METADATA_KEYS} are accepted. The file is damaged."
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in self.metadata:
                raise CheckpointError(f"{path}: the metadata key {key!r} appears twice.")
            self.metadata[key] = cursor.value(key)
        self.tensors: dict[str, StoredTensor] = {}
        for _ in range(num_tensors):
            name, tensor = _tensor_entry(cursor)
            if name in self.tensors:
                raise CheckpointError(f"{path}: the tensor {name!r} appears twice.")
            self.tensors[name] = tensor
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise CheckpointError(
                f"{path}: general.alignment must be a power of two up to {MAX_ALIGNMENT}. Received: {alignment!r}"
            )
        self.data_start = -(-cursor.position // alignment) * alignment

    def floats(self, name: str) -> np.ndarray:
        """Read a small vector that is stored as float32.

        Raises:
            CheckpointError: If it is stored otherwise, or does not lie in the file.
        """
        shape, kind, offset = self.tensors[name]
        end = self.data_start + offset + math.prod(shape) * 4
        if kind != 0 or len(shape) != 1 or end > self.size:
            raise CheckpointError(f"{self.path}: {name!r} must be a vector of float32 inside the file; it is damaged.")
        return self.raw(offset, math.prod(shape) * 4).view("<f4")

    def raw(self, begin: int, nbytes: int) -> np.ndarray:
        """View `nbytes` bytes that start `begin` bytes into the data."""
        return np.frombuffer(self._map, np.uint8, nbytes, self.data_start + begin)

    def release(self, begin: int, nbytes: int) -> None:
        """Drop the mapped pages of a byte range of the data."""
        start = (self.data_start + begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, self.data_start + begin + nbytes - start)


class GgufSource:
    """Tensors of a GGUF file under their Hugging Face names and in their Hugging Face row order, as float32.

    A read touches the rows and the quantisation blocks that cover the slice, nothing else.
    """

    def __init__(
        self,
        file: GgufFile,
        tensor_name: Callable[[str], str],
        row_order: Callable[[str, int], np.ndarray | None],
        *,
        is_shifted: Callable[[str], bool] = lambda name: False,
        is_transposed: Callable[[str], bool] = lambda name: False,
        left_out: Collection[str] = (),
    ):
        """Check the table of tensors and rename it.

        Args:
            file: The open file.
            tensor_name: GGUF name to Hugging Face name; unknown names come back unchanged.
            row_order: Hugging Face name and row count to the stored row of each row; None when they agree.
            is_shifted: Whether the file holds the values of a Hugging Face name plus one.
            is_transposed: Whether the file holds a Hugging Face name transposed.
            left_out: GGUF names of tensors that hold no weight.

        Raises:
            CheckpointError: If a tensor's type is unknown, or its bytes do not lie in the file.
            ImportError: If the `gguf` package is not installed.
        """
        quants, block_sizes = _dequantiser()
        self._file, self._quants, self._row_order = file, quants, row_order
        self._is_shifted, self._is_transposed = is_shifted, is_transposed
        self._tensors: dict[str, StoredTensor] = {}
        self._blocks: dict[str, tuple[int, int]] = {}
        extents = []
        for stored_name, tensor in file.tensors.items():
            name = tensor_name(stored_name)
            block = block_sizes.get(tensor.ggml_type)
            if block is None:
                raise CheckpointError(
                    f"{file.path}: tensor {stored_name!r} has ggml type {tensor.ggml_type}, which the installed gguf "
                    "package cannot dequantise. Upgrade gguf, or convert the file to a type such as Q8_0."
                )
            if not tensor.shape or tensor.shape[-1] % block[0]:
                raise CheckpointError(
                    f"{file.path}: tensor {stored_name!r} of shape {tensor.shape} is not made of blocks of {block[0]}."
                )
            if name in self._tensors:
                raise CheckpointError(f"{file.path}: two tensors map to {name!r}.")
            nbytes = math.prod(tensor.shape) // block[0] * block[1]
            extents.append((tensor.offset, tensor.offset + nbytes, stored_name))
            if stored_name not in left_out:
                self._tensors[name], self._blocks[name] = tensor, block
        check_extents(extents, max(0, file.size - file.data_start), file.path)
        self.nbytes = sum(end - begin for begin, end, _ in extents)

    def names(self) -> Iterable[str]:
        """Hugging Face names of all tensors."""
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape, and float32: what `read` returns."""
        shape = self._tensors[name].shape
        return TensorInfo(shape[::-1] if self._is_transposed(name) else shape, np.dtype(np.float32))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Dequantise a part of a tensor."""
        if self._is_transposed(name):
            return self._read_stored(name, index[::-1]).T
        values = self._read_stored(name, index)
        return values - np.float32(1) if self._is_shifted(name) else values

    def _read_stored(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        tensor, (block_size, block_bytes) = self._tensors[name], self._blocks[name]
        *outer, width = tensor.shape
        row_bytes = width // block_size * block_bytes
        rows = self._file.raw(tensor.offset, math.prod(outer) * row_bytes).reshape(*outer, row_bytes)
        columns = index[-1]
        first, last = columns.start // block_size, -(-columns.stop // block_size)
        order = self._row_order(name, tensor.shape[0])
        if order is None:
            selected = rows[(*index[:-1], slice(first * block_bytes, last * block_bytes))]
        elif outer:
            kept = rows[order[index[0]]]
            selected = kept[(slice(None), *index[1:-1], slice(first * block_bytes, last * block_bytes))]
        else:  # a bias: every element is a row
            if block_size != 1:
                raise CheckpointError(
                    f"{self._file.path}: the bias {name!r} is quantised; its rows cannot be reordered."
                )
            selected = rows.reshape(width, row_bytes // width)[order[columns]].reshape(-1)
            first, columns = 0, slice(0, len(order[columns]))
        values = self._dequantise(selected, tensor.ggml_type, block_size, block_bytes)
        return values[..., columns.start - first * block_size : columns.stop - first * block_size]

    def release(self, name: str) -> None:
        """Drop the mapped pages of the tensor."""
        tensor, (block_size, block_bytes) = self._tensors[name], self._blocks[name]
        self._file.release(tensor.offset, math.prod(tensor.shape) // block_size * block_bytes)

    def close(self) -> None:
        """Do nothing: the file is unmapped when it and the last view of it are gone."""

    def _dequantise(self, raw: np.ndarray, ggml_type: int, block_size: int, block_bytes: int) -> np.ndarray:
        if not raw.size:
            return np.zeros((*raw.shape[:-1], raw.shape[-1] // block_bytes * block_size), np.float32)
        from gguf.constants import GGMLQuantizationType

        blocks = np.ascontiguousarray(raw).reshape(-1, block_bytes)
        # Blocks do not depend on each other, so they may be regrouped into rows that the package expands fast.
        in_row = max(1, GROUP_VALUES // block_size)
        even = len(blocks) // in_row * in_row
        groups = [blocks[:even].reshape(-1, in_row * block_bytes), blocks[even:].reshape(1, -1)]
        kind = GGMLQuantizationType(ggml_type)
        expanded = [self._quants.dequantize(group, kind).reshape(-1) for group in groups if group.size]
        values = expanded[0] if len(expanded) == 1 else np.concatenate(expanded)
        return values.reshape(*raw.shape[:-1], raw.shape[-1] // block_bytes * block_size)


class _Cursor:
    """Reads header fields in order, never past the end of the file."""

    def __init__(self, data: Any, size: int, path: Path):
        self.data, self.size, self.path, self.position = data, size, path, 0
        self.items_left = MAX_ARRAY_ITEMS

    def bytes(self, count: int) -> bytes:
        end = self.position + count
        if end > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{self.path}: the header reaches byte {end}; at most {MAX_METADATA_BYTES} are read. The file is "
                "damaged."
            )
        if end > self.size:
            raise CheckpointError(
                f"{self.path}: the header asks for {count} bytes at {self.position}, the file ends at {self.size}. "
                "The file is truncated or damaged; fetch it again."
            )
        result = self.data[self.position : end]
        self.position = end
        return result

    def number(self, layout: str) -> int:
        return struct.unpack(layout, self.bytes(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.number("<Q")
        if length > min(MAX_STRING_BYTES, self.size - self.position):
            raise CheckpointError(
                f"{self.path}: a string at byte {self.position} asks for {length} bytes; the file ends at {self.size} "
                f"and a string may have {MAX_STRING_BYTES}. The file is truncated or damaged; fetch it again."
            )
        raw = self.bytes(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: a string at byte {self.position} is not UTF-8 ({error}).") from error

    def value(self, key: str) -> Any:
        kind = self.number("<I")
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self._scalars(key, kind, 1)[0]
        item_kind, length = self.number("<I"), self.number("<Q")
        if length > self.items_left:
            raise CheckpointError(
                f"{self.path}: {key!r} claims {length} items; all arrays together may have {MAX_ARRAY_ITEMS}."
            )
        self.items_left -= length
        if item_kind == STRING:
            # Each string takes at least its 8-byte length, so a false count stops here and not after a huge loop.
            if length * 8 > self.size - self.position:
                raise CheckpointError(f"{self.path}: {key!r} claims {length} strings, more than the file can hold.")
            return [self.string() for _ in range(length)]
        return self._scalars(key, item_kind, length)

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        dtype = SCALARS.get(kind)
        if dtype is None:
            raise CheckpointError(f"{self.path}: {key!r} has value type {kind}, which GGUF does not define here.")
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype).tolist()


def _tensor_entry(cursor: _Cursor) -> tuple[str, StoredTensor]:
    name = cursor.string()
    num_dimensions = cursor.number("<I")
    if num_dimensions > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} has {num_dimensions} dimensions; ggml has {MAX_DIMENSIONS}."
        )
    innermost_first = [cursor.number("<Q") for _ in range(num_dimensions)]
    ggml_type, offset = cursor.number("<I"), cursor.number("<Q")
    return name, StoredTensor(tuple(reversed(innermost_first)), ggml_type, offset)


def _dequantiser() -> tuple[Any, dict[int, tuple[int, int]]]:
    """The gguf package's dequantisers, and (elements, bytes) per block of every type they know."""
    try:
        from gguf import quants
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ImportError(
            "Reading the tensors of a .gguf file needs the gguf package: pip install 'dew[gguf]'"
        ) from error
    plain = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
    known = [*plain, *quants._type_traits]
    return quants, {int(kind): GGML_QUANT_SIZES[kind] for kind in known}

"""Event files that TensorBoard reads, written without TensorFlow: scalars only.

Entry point: `EventFile`. Records are framed as TFRecord (length, data, a masked CRC-32C of each); their contents are
the protocol buffers Event, Summary and TensorProto of TensorFlow, encoded here by field number.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
_MASK = 0xA282EAD8
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types
_DT_FLOAT = 1
_DATA_CLASS_SCALAR = 1
_numbers = itertools.count()


def _table() -> tuple[int, ...]:
    entries = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_CRC = _table()


def masked_crc(data: bytes) -> int:
    """Return the checksum that a TFRecord keeps of some bytes.

    Args:
        data: The bytes.
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """Frame one record.

    Args:
        data: Its contents.
    """
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative int64 takes ten bytes
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _message(number: int, data: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(data)) + data


def _event(step: int, contents: bytes) -> bytes:
    """Encode an Event: wall time (1), step (2), and what it reports."""
    return _key(1, _DOUBLE) + struct.pack("<d", time.time()) + _key(2, _VARINT) + _varint(step) + contents


def _scalar(tag: str, value: float) -> bytes:
    """Encode a Summary.Value: tag (1), tensor (8), metadata (9) that names the scalars plugin."""
    # A packed float_val (5) of one number, in a tensor of dtype (1) float and an empty shape (2).
    tensor = _key(1, _VARINT) + _varint(_DT_FLOAT) + _message(2, b"") + _message(5, struct.pack("<f", value))
    metadata = _message(1, _message(1, b"scalars")) + _key(4, _VARINT) + _varint(_DATA_CLASS_SCALAR)
    return _message(1, tag.encode()) + _message(8, tensor) + _message(9, metadata)


class EventFile:
    """One file of events, made when the first number comes.

    Args:
        folder: Where it goes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append numbers; they are in the file when this returns.

        Args:
            step: The number on the horizontal axis.
            scalars: Numbers by tag.
        """
        events = []
        if self._path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = (
                f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}.v2"
            )
            self._path = self._folder / name
            events.append(_event(0, _message(3, b"brain.Event:2")))
        for tag, value in scalars.items():
            events.append(_event(step, _message(5, _message(1, _scalar(tag, value)))))
        with self._path.open("ab") as file:
            file.write(b"".join(map(record, events)))

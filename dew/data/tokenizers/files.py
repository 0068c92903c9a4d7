"""Reads the small files of a tokenizer within bounds.

Entry points: `read_json`, `read_text`, `read_bytes`, `refusing_panics`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 256 * 2**20
MAX_TOKENS = 2_000_000


def read_bytes(path: Path) -> bytes:
    """Read a file of bounded size.

    Raises:
        ValueError: If it is larger than any tokenizer, or is no file.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; at most {MAX_BYTES} are read.")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Read a UTF-8 text of bounded size, its line ends as they are.

    Raises:
        ValueError: If it is larger than any tokenizer, or is not UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a readable text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is not there is an empty one.

    Raises:
        ValueError: If the file is too large, is not JSON, or is not an object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(read_bytes(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object. Received: {type(value).__name__}")
    return value


@contextlib.contextmanager
def refusing_panics(where: object) -> Iterator[None]:
    """Turn what the Rust side raises into a ValueError that names the file.

    Args:
        where: What is being read.

    Raises:
        ValueError: For any failure inside, a panic included.
    """
    try:
        yield
    except BaseException as error:
        # It raises bare Exception, and for its own defects a PanicException that is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{where} is not a readable tokenizer: {error}") from error
        raise

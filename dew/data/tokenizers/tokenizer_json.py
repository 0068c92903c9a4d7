"""Reads a tokenizer.json after checking what the Rust library takes on trust.

Entry point: `read_tokenizer_json`. Out of a vocabulary and merges that do not fit together, or a prefix that cuts a
character, the library makes texts that are not UTF-8 and ends the process; such files are refused here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from dew.data.tokenizers.charsmap import check_charsmap
from dew.data.tokenizers.files import MAX_TOKENS, read_text, refusing_panics


def read_tokenizer_json(path: Path) -> Backend:
    """Read a tokenizer.json; padding and truncation in it are left out.

    Args:
        path: The file.

    Raises:
        ValueError: If it is damaged.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    model = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict):
        raise ValueError(f"{path} is not a readable tokenizer: it has no model.")
    if "merges" in model:
        _check_pairs(model, path)
    for charsmap in _charsmaps(value.get("normalizer"), path):
        check_charsmap(charsmap, path)
    for number in _added_ids(value, path):
        if type(number) is not int or not 0 <= number < MAX_TOKENS:
            raise ValueError(f"{path}: an added token needs a whole number as its id. Received: {str(number)[:40]}")
    with refusing_panics(path):
        backend = Backend.from_str(text)
    backend.no_padding()
    backend.no_truncation()
    return backend


def _charsmaps(normalizer: Any, path: Path) -> list[bytes]:
    """Collect the compiled normalisations of a normalizer, or of a sequence of them."""
    if not isinstance(normalizer, dict):
        return []
    found = [each for step in normalizer.get("normalizers") or [] for each in _charsmaps(step, path)]
    if normalizer.get("precompiled_charsmap"):
        try:
            found.append(base64.b64decode(normalizer["precompiled_charsmap"], validate=True))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: precompiled_charsmap is not base64: {error}") from error
    return found


def _added_ids(value: Mapping[str, Any], path: Path) -> list[Any]:
    added = value.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError(f"{path}: added_tokens must be a list of objects.")
    return [token.get("id") for token in added]


def _check_pairs(model: Mapping[str, Any], path: Path) -> None:
    """Check that the merges of byte pairs join tokens of the vocabulary into tokens of it."""
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocabulary, dict) or not isinstance(merges, list):
        raise ValueError(f"{path}: vocab must be an object and merges a list.")
    for token, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < MAX_TOKENS:
            raise ValueError(f"{path}: the token {token[:40]!r} has the id {str(number)[:40]}, which is no token's.")
    prefix = model.get("continuing_subword_prefix") or ""
    if not isinstance(prefix, str):
        raise ValueError(f"{path}: continuing_subword_prefix must be a text. Received: {str(prefix)[:40]}")
    for merge in merges:
        left, right = _pair(merge)
        joined = None if left is None or not right.startswith(prefix) else left + right[len(prefix) :]
        if left not in vocabulary or right not in vocabulary or joined not in vocabulary:
            raise ValueError(f"{path}: merges holds {str(merge)[:80]}, which does not join two tokens into a third.")


def _pair(merge: Any) -> tuple[str | None, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) for part in parts):
        return parts[0], parts[1]
    return None, ""

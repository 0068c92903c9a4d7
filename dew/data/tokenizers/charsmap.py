"""Checks SentencePiece's compiled normalisation, which the tokenizers library walks without looking at its bounds.

Entry point: `check_charsmap`. The bytes are the length of a trie, the trie as 32-bit units of a double array
(https://github.com/s-yata/darts-clone), and the replacements, each ended by a zero.
"""

from __future__ import annotations

import numpy as np

# Nodes looked at together: each has up to 255 children.
_CHUNK = 4096


def check_charsmap(data: bytes, where: object) -> None:
    """Refuse a charsmap in which any text would leave the trie or the replacements.

    Args:
        data: The precompiled charsmap.
        where: The file, for errors.

    Raises:
        ValueError: If it is damaged.
    """
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or not 4 <= size <= len(data) - 4:
        raise _damaged(where, f"its trie has {size} of {len(data)} bytes")
    units = np.frombuffer(data, "<u4", size // 4, offset=4)
    _check_values(_reachable_values(units, where), data[4 + size :], where)


def _reachable_values(units: np.ndarray, where: object) -> np.ndarray:
    """Walk the trie, every node once, and return the replacements that its leaves name."""
    seen = np.zeros(len(units), bool)
    letters = np.arange(1, 256, dtype=np.int64)
    todo = np.asarray([_child_base(units[:1])[0]])
    values: list[np.ndarray] = []
    while len(todo):
        nodes, todo = todo[:_CHUNK], todo[_CHUNK:]
        if np.any(nodes | 255 >= len(units)):
            raise _damaged(where, f"its trie of {len(units)} units points to {int(nodes.max() | 255)}")
        places = nodes[:, None] ^ letters
        children = units[places]
        is_child = (children & 0x800000FF) == letters
        places, children = places[is_child], children[is_child]
        bases = places ^ _child_base(children)
        leaves = bases[(children >> 8) & 1 == 1]
        if np.any(leaves >= len(units)):
            raise _damaged(where, f"a leaf of its trie lies at {int(leaves.max())} of {len(units)} units")
        values.append(units[leaves] & 0x7FFFFFFF)
        # A base beyond the units is kept: its own check names it.
        fresh = np.unique(bases)
        fresh = fresh[(fresh >= len(units)) | ~seen[np.minimum(fresh, len(units) - 1)]]
        seen[fresh[fresh < len(units)]] = True
        todo = np.concatenate([todo, fresh])
    return np.concatenate(values)


def _child_base(units: np.ndarray) -> np.ndarray:
    return ((units >> 10) << ((units & 0x200) >> 6)).astype(np.int64)


def _check_values(values: np.ndarray, replacements: bytes, where: object) -> None:
    try:
        replacements.decode()
    except UnicodeDecodeError as error:
        raise _damaged(where, f"its replacements are not UTF-8: {error.reason}") from error
    if not len(values):
        return
    if int(values.max()) >= len(replacements):
        raise _damaged(where, f"a replacement begins at {int(values.max())} of {len(replacements)} bytes")
    first = np.frombuffer(replacements, np.uint8)[values]
    if np.any(first & 0xC0 == 0x80):
        raise _damaged(where, "a replacement begins inside a character")


def _damaged(where: object, what: str) -> ValueError:
    return ValueError(f"{where} has a damaged precompiled_charsmap: {what}. Get the file again.")

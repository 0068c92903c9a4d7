"""Where documents go in rows of one length: one to a row, or first-fit several to a row.

Entry points: `plan_rows`, which decides places, and `fill_rows`, which writes tokens, segment ids
and positions. First-fit keeps within 17/10 of the fewest rows
(Johnson et al., https://doi.org/10.1137/0203025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Document:
    """Ids of one document and which of them are scored.

    Attributes:
        tokens: int32 [tokens].
        scored: bool [tokens]; token i is scored where true.
    """

    tokens: np.ndarray
    scored: np.ndarray


def plan_rows(lengths: Sequence[int], width: int, *, packing: bool) -> list[list[int]]:
    """Decide which documents share a row.

    Args:
        lengths: Tokens of each document, at most `width`.
        width: Tokens in a row.
        packing: Whether documents may share a row. Each goes into the first open row with room,
            so a row lists its documents in their own order.

    Returns:
        Document numbers of each row.

    Raises:
        ValueError: If a document is longer than a row.
    """
    for number, length in enumerate(lengths):
        if length > width:
            raise ValueError(f"Document {number} has {length} tokens, more than a row of {width}. Cut it first.")
    if not packing:
        return [[number] for number in range(len(lengths))]
    rooms = _RoomTree(len(lengths), width)
    rows: list[list[int]] = []
    for number, length in enumerate(lengths):
        row = rooms.first_with(length)
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        rooms.take(row, length)
    return rows


class _RoomTree:
    """The room left in each row, as a tree of maxima: finds the first fit in log time."""

    def __init__(self, rows: int, width: int) -> None:
        self.leaves = 1 << max(rows - 1, 0).bit_length()
        self.room = np.full(2 * self.leaves, width, np.int64)

    def first_with(self, length: int) -> int:
        node = 1
        while node < self.leaves:
            node = 2 * node if self.room[2 * node] >= length else 2 * node + 1
        return node - self.leaves

    def take(self, row: int, length: int) -> None:
        node = self.leaves + row
        self.room[node] -= length
        while node > 1:
            node //= 2
            self.room[node] = max(self.room[2 * node], self.room[2 * node + 1])


def fill_rows(documents: Sequence[Document], rows: Sequence[Sequence[int]], width: int, pad_id: int) -> dict:
    """Write documents into rows.

    Args:
        documents: The documents.
        rows: Document numbers of each row, from `plan_rows`.
        width: Tokens in a row.
        pad_id: Fills what no document covers; `segment_ids` 0 marks it.

    Returns:
        `tokens`, `segment_ids`, `positions` int32 [rows, width] and `loss_mask` bool
        [rows, width]. Segments count from 1 and positions from 0 inside each document. The first
        token of a document is never scored: nothing of its own document comes before it.
    """
    shape = (len(rows), width)
    filled = {
        "tokens": np.full(shape, pad_id, np.int32),
        "loss_mask": np.zeros(shape, bool),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
    }
    for row, numbers in enumerate(rows):
        start = 0
        for segment, number in enumerate(numbers, start=1):
            document = documents[number]
            place = np.s_[row, start : start + len(document.tokens)]
            filled["tokens"][place] = document.tokens
            filled["loss_mask"][place] = document.scored
            filled["loss_mask"][row, start] = False
            filled["segment_ids"][place] = segment
            filled["positions"][place] = np.arange(len(document.tokens))
            start += len(document.tokens)
    return filled

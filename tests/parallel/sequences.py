"""Packed rows that are awkward to split over positions."""

import numpy as np

from tests.tiny import VOCAB_SIZE

LENGTH = 48
UNSCORED = slice(24, 36)
"""Positions without a scored token in any row: whole slices of 4 and of 8."""


def packed_segments(rows: int = 8, length: int = LENGTH + 1) -> np.ndarray:
    """Number the documents of rows: odd lengths, borders on and off the borders of slices, padding, a row of padding.

    Returns:
        int32 [rows, length]; 0 marks padding.
    """
    segments = np.zeros((rows, length), np.int32)
    ends = [
        (7, 12, 15, 24, 25, 36, 49),
        (49,),
        (6, 12, 18, 24, 30, 36, 42, 48, 49),
        (13, 36, 41),
        (1, 2, 3, 48),
        (5, 24, 31),
        (36, 37, 49),
    ]
    for row, borders in enumerate(ends[: rows - 1]):
        start = 0
        for number, end in enumerate(borders):
            segments[row, start:end] = number + 1
            start = end
    return segments


def packed_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Draw eight packed rows with a mask that scores a different number of tokens in each.

    Args:
        seed: Seed of the draw.

    Returns:
        `tokens`, `segment_ids` and `loss_mask`, each [8, 49].
    """
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, VOCAB_SIZE, (8, LENGTH + 1)).astype(np.int32)
    mask = generator.random(tokens.shape) < np.linspace(0.3, 1.0, 8)[:, None]
    mask[:, UNSCORED.start + 1 : UNSCORED.stop + 1] = False
    return {"tokens": tokens, "segment_ids": packed_segments(), "loss_mask": mask}

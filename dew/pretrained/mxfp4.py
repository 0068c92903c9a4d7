"""Experts packed in MXFP4, unpacked slice by slice: a pair of tensors, `*_blocks` and `*_scales`, read as one.

Entry point: `unpacked`. A block is 32 neighbours of 4 bits (E2M1), the low half of a byte first, with a power of two
(E8M0) for all (OCP Microscaling Formats, version 1.0). bfloat16 holds every value exactly.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from dew.pretrained.source import CheckpointError, TensorInfo, TensorSource

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_VALUES, BLOCK_BYTES = 32, 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of a value say; the fourth is its sign."""
SCALE_BIAS, SCALE_NAN = 127, 255


def is_mxfp4(config: Any) -> bool:
    """Say whether a `quantization_config` announces the format.

    Args:
        config: Value of the field.
    """
    return isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def unpacked(source: TensorSource, where: object) -> TensorSource:
    """View a checkpoint with a tensor [E, in, out] in place of each pair of blocks [E, out, in / 32, 16] and scales.

    Args:
        source: The checkpoint.
        where: The checkpoint, for errors.

    Returns:
        The view; the source as it is where it has no pairs.

    Raises:
        CheckpointError: If a half of a pair is missing, stands beside the tensor it would be, or has another shape or
            dtype than the format.
    """
    names = set(source.names())
    pairs = {name.removesuffix(ending) for name in names for ending in (BLOCKS, SCALES) if name.endswith(ending)}
    for name in sorted(pairs):
        _check(name, names, source, where)
    return _Unpacked(source, pairs) if pairs else source


class _Unpacked:
    """A source whose pairs are one tensor each."""

    def __init__(self, source: TensorSource, pairs: set[str]):
        self._source, self._pairs = source, pairs
        halves = {name + ending for name in pairs for ending in (BLOCKS, SCALES)}
        self._names = [name for name in source.names() if name not in halves] + sorted(pairs)
        self.nbytes = source.nbytes

    def names(self) -> Iterable[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        if name not in self._pairs:
            return self._source.info(name)
        experts, out, blocks, _ = self._source.info(name + BLOCKS).shape
        return TensorInfo((experts, blocks * BLOCK_VALUES, out), np.dtype(jnp.bfloat16))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Unpack the blocks that cover the slice, nothing else."""
        if name not in self._pairs:
            return self._source.read(name, index)
        experts, inputs, outputs = index
        first = inputs.start // BLOCK_VALUES
        covering = (experts, outputs, slice(first, -(-inputs.stop // BLOCK_VALUES)))
        blocks = self._source.read(name + BLOCKS, (*covering, slice(0, BLOCK_BYTES)))
        values = unpack(blocks, self._source.read(name + SCALES, covering))
        start = first * BLOCK_VALUES
        return values[..., inputs.start - start : inputs.stop - start].swapaxes(1, 2)

    def release(self, name: str) -> None:
        for each in (name + BLOCKS, name + SCALES) if name in self._pairs else (name,):
            self._source.release(each)

    def close(self) -> None:
        self._source.close()


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Unpack blocks.

    Args:
        blocks: Bytes, uint8 [..., G, 16].
        scales: Exponents plus 127, uint8 [..., G]; 255 is not a number.

    Returns:
        The values, bfloat16 [..., 32 G].
    """
    index = (scales.astype(np.uint16) << np.uint16(8))[..., None] | blocks
    pairs = _pairs()[index]
    return pairs.reshape(*scales.shape[:-1], -1).view(jnp.bfloat16)


@functools.cache
def _pairs() -> np.ndarray:
    """Tabulate the two values of each scale and byte, as one word of both: 256 KiB, so that a byte is one look-up."""
    magnitudes = np.asarray(MAGNITUDES, np.float32)
    codes = np.concatenate([magnitudes, -magnitudes])
    values = codes[np.arange(256)[:, None] >> np.array([0, 4]) & 15].astype(np.float64)
    scaled = np.ldexp(values, np.arange(256)[:, None, None] - SCALE_BIAS)
    scaled[SCALE_NAN] = np.nan
    with np.errstate(over="ignore"):  # twice the largest scale is beyond float32 too
        words = np.ascontiguousarray(scaled.astype(np.float32).astype(jnp.bfloat16))
    return words.view(np.uint32).reshape(-1)


def _check(name: str, names: set[str], source: TensorSource, where: object) -> None:
    """Check one pair."""
    for half, other in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
        if name + half not in names:
            raise CheckpointError(f"{where}: {name + other!r} is packed and has no {name + half!r} beside it.")
    if name in names:
        raise CheckpointError(f"{where}: {name!r} is stored both packed and as it is; remove one of them.")
    (blocks, blocks_dtype), (scales, scales_dtype) = source.info(name + BLOCKS), source.info(name + SCALES)
    if blocks_dtype != np.uint8 or scales_dtype != np.uint8:
        raise CheckpointError(
            f"{where}: blocks and scales of {name!r} must be uint8. Received: blocks={blocks_dtype.name}, "
            f"scales={scales_dtype.name}"
        )
    if len(blocks) != 4 or blocks[3] != BLOCK_BYTES or scales != blocks[:3]:
        raise CheckpointError(
            f"{where}: {name!r} needs blocks [experts, out, in / {BLOCK_VALUES}, {BLOCK_BYTES}] and a scale for each. "
            f"Received: blocks {blocks}, scales {scales}"
        )

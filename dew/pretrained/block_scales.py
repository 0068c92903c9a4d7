"""Checkpoints whose matrices are float8 with a scale for each block, as DeepSeek-V3 and others publish them.

Entry points: `block_scales`, what a config says of them, and `BlockScaledSource`, which multiplies the blocks of a
slice as it is read (https://arxiv.org/abs/2412.19437, section 3.3.2). Activations stay as they are: the published
kernels round those to float8 as well, which is not done here.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dew.pretrained.source import CheckpointError, TensorInfo, TensorSource

SUFFIX = "_scale_inv"
"""What the name of a matrix's scales adds to its own. They multiply, whatever it says."""
FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_KNOWN = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("ue8m0", "float", None),  # which scales were chosen from; they are stored as float32
}
_UNREAD = {"weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize"}


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """How the matrices of a checkpoint are scaled.

    Attributes:
        rows: Rows of a block; the last block of a matrix may have fewer.
        columns: Columns of a block.
    """

    rows: int
    columns: int


def block_scales(config: Mapping[str, Any], where: object) -> BlockScales | None:
    """Read whether a config says that its matrices are float8 in blocks.

    Args:
        config: The parsed config.json.
        where: The checkpoint, for errors.

    Returns:
        The blocks; None where it states no quantisation, or one of another method.

    Raises:
        CheckpointError: If it states this method in a form that is not known.
    """
    stated = config.get("quantization_config")
    if not isinstance(stated, dict) or stated.get("quant_method") != "fp8":
        return None
    unknown = {
        name: value
        for name, value in stated.items()
        if name not in _UNREAD and (name not in _KNOWN or value not in _KNOWN[name])
    }
    size = stated.get("weight_block_size")
    if unknown or not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        listed = ", ".join(f"{name}={str(value)[:60]}" for name, value in unknown.items())
        raise CheckpointError(
            f"{where}: of float8 weights those with a scale for each block of weight_block_size=[rows, columns] are "
            f"read. Received: weight_block_size={size!r}{', ' if listed else ''}{listed}"
        )
    return BlockScales(*size)


class BlockScaledSource:
    """Tensors of another source, its float8 matrices multiplied by their scales."""

    def __init__(self, source: TensorSource, scales: BlockScales, dtype: Any, where: object):
        """Wrap a source and check that every float8 matrix has its scales.

        Args:
            source: The checkpoint as it is stored.
            scales: Its blocks.
            dtype: What the products are rounded to, once.
            where: The checkpoint, for errors.

        Raises:
            CheckpointError: If a matrix lacks scales, or has too few or too many.
        """
        self._source, self._scales, self._dtype = source, scales, np.dtype(dtype)
        self.nbytes = source.nbytes
        stored = {name: source.info(name) for name in source.names()}
        self._scaled = {name for name, info in stored.items() if info.dtype == FLOAT8}
        for name in self._scaled:
            shape = stored[name].shape
            blocks = tuple(-(-n // size) for n, size in zip(shape, (scales.rows, scales.columns), strict=False))
            found = stored.get(name + SUFFIX)
            if len(shape) != 2 or found is None or found.shape != blocks or found.dtype != np.float32:
                raise CheckpointError(
                    f"{where}: the float8 tensor {name!r} of shape {shape} needs {name + SUFFIX!r}, float32 scales of "
                    f"shape {blocks} for its blocks of {scales.rows} x {scales.columns}. Received: {found}"
                )

    def names(self) -> Iterable[str]:
        """Names of all tensors but the scales."""
        scales = {name + SUFFIX for name in self._scaled}
        return [name for name in self._source.names() if name not in scales]

    def info(self, name: str) -> TensorInfo:
        """Shape and the dtype that `read` returns."""
        info = self._source.info(name)
        return TensorInfo(info.shape, self._dtype) if name in self._scaled else info

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read a rectangular part, multiplied in float32."""
        part = self._source.read(name, index)
        if name not in self._scaled:
            return part
        sizes = (self._scales.rows, self._scales.columns)
        covering = tuple(slice(own.start // size, -(-own.stop // size)) for own, size in zip(index, sizes, strict=True))
        scales = self._source.read(name + SUFFIX, covering)
        rows, columns = (
            np.arange(own.start, own.stop) // size - cover.start
            for own, size, cover in zip(index, sizes, covering, strict=True)
        )
        product = part.astype(np.float32)
        product *= scales[rows][:, columns]
        return product.astype(self._dtype, copy=False)

    def release(self, name: str) -> None:
        """Give back the pages of a matrix and of its scales."""
        self._source.release(name)
        if name in self._scaled:
            self._source.release(name + SUFFIX)

    def close(self) -> None:
        """Give the files back."""
        self._source.close()

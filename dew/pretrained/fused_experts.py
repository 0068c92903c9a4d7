"""Experts that a checkpoint stores as one tensor for all of a layer, viewed as a tensor for each.

Entry point: `split_experts`. Models in memory of transformers hold `experts.gate_up_proj` [E, 2 F, D] and
`experts.down_proj` [E, D, F]; published checkpoints `experts.0.gate_proj.weight` [F, D] and so on.
"""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from dew.pretrained.recipe import MAX_EXPERTS
from dew.pretrained.source import CheckpointError, TensorInfo, TensorSource

_FUSED = re.compile(r"(?P<block>.+\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclasses.dataclass(frozen=True)
class _Part:
    """Where one expert's projection lies: rows of one matrix of a tensor."""

    tensor: str
    expert: int
    first: int
    info: TensorInfo


def split_experts(source: TensorSource, where: object) -> TensorSource:
    """View a checkpoint with a tensor for each expert.

    Args:
        source: The checkpoint.
        where: The checkpoint, for errors.

    Returns:
        The view; the source as it is where no tensor holds several experts.

    Raises:
        CheckpointError: If such a tensor has another form, or stands beside one of those that it would give.
    """
    names = set(source.names())
    fused = {name: found for name in source.names() if (found := _FUSED.fullmatch(name))}
    parts: dict[str, _Part] = {}
    for tensor, found in fused.items():
        shape, dtype = source.info(tensor)
        projections = _PARTS[found["kind"]]
        # Sizes of 0 take no bytes of the file, so that the others may say anything.
        if len(shape) != 3 or 0 in shape or shape[1] % len(projections) or shape[0] > MAX_EXPERTS:
            raise CheckpointError(
                f"{where}: {tensor!r} must hold {' and '.join(projections)} of all experts, [experts, out, in], of at "
                f"most {MAX_EXPERTS} experts. Received: shape {shape}"
            )
        rows = shape[1] // len(projections)
        for expert in range(shape[0]):
            for place, projection in enumerate(projections):
                name = f"{found['block']}.{expert}.{projection}.weight"
                parts[name] = _Part(tensor, expert, place * rows, TensorInfo((rows, shape[2]), dtype))
    if twice := sorted(names & parts.keys()):
        raise CheckpointError(f"{where}: {twice[0]!r} is stored twice, also in {parts[twice[0]].tensor!r}.")
    return _SplitExperts(source, names - fused.keys(), parts) if parts else source


class _SplitExperts:
    """A source whose experts are tensors of their own."""

    def __init__(self, source: TensorSource, others: set[str], parts: dict[str, _Part]):
        self._source, self._parts = source, parts
        self._names = [name for name in source.names() if name in others] + list(parts)
        self.nbytes = source.nbytes

    def names(self) -> Iterable[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        return self._parts[name].info if name in self._parts else self._source.info(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if name not in self._parts:
            return self._source.read(name, index)
        part, (rows, columns) = self._parts[name], index
        own = slice(part.first + rows.start, part.first + rows.stop)
        return self._source.read(part.tensor, (slice(part.expert, part.expert + 1), own, columns))[0]

    def release(self, name: str) -> None:
        self._source.release(self._parts[name].tensor if name in self._parts else name)

    def close(self) -> None:
        self._source.close()

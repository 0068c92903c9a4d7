"""Checkpoints in several files: the index that names them, and their tensors under one set of names.

Entry points: `JoinedFiles`, `shard_names`, `open_shards`.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dew.pretrained.source import CheckpointError, TensorInfo, contained, read_json


class JoinedFiles:
    """The tensors of one or more files under one set of names."""

    def __init__(self, files: Sequence[Any], where: Path):
        """Join files.

        Args:
            files: A `TensorSource` with a `path` each.
            where: The checkpoint, for errors.

        Raises:
            CheckpointError: If two files hold a tensor of the same name.
        """
        self.where = where
        self._file_of: dict[str, Any] = {}
        for file in files:
            for name in file.names():
                if name in self._file_of:
                    raise CheckpointError(
                        f"{where}: tensor {name!r} is in both {self._file_of[name].path.name} and {file.path.name}. "
                        "A tensor must have one source; remove the file that does not belong."
                    )
                self._file_of[name] = file
        self._files = files
        self.nbytes = sum(file.nbytes for file in files)

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape and stored dtype."""
        return self._file_of[name].info(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """View of a part of the tensor, backed by its file."""
        return self._file_of[name].read(name, index)

    def release(self, name: str) -> None:
        """Drop the mapped pages of the tensor."""
        self._file_of[name].release(name)

    def path_of(self, name: str) -> Path | None:
        """File that holds a tensor, or None."""
        file = self._file_of.get(name)
        return None if file is None else file.path

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


def shard_names(index_path: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Read the `weight_map` of an index: tensor name to file name.

    Args:
        index_path: The index.
        suffix: What every file name ends with.

    Raises:
        CheckpointError: If the index has no usable `weight_map`.
    """
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no 'weight_map' of tensor names to file names.")
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str) or not file_name.endswith(suffix):
            raise CheckpointError(
                f"{index_path}: tensor {tensor!r} must map to a {suffix} file. Received: {file_name!r}"
            )
    return weight_map


def open_shards(directory: Path, index_path: Path, suffix: str, open_file: Callable[[Path], Any]) -> JoinedFiles:
    """Open the files that an index names, and check that it and they say the same.

    Args:
        directory: Of the checkpoint.
        index_path: The index in it.
        suffix: What every file name ends with.
        open_file: Path to a `TensorSource` with a `path`.

    Raises:
        CheckpointError: If a file is missing or outside of the directory, or does not hold what the index says.
    """
    weight_map = shard_names(index_path, suffix)
    paths = {name: contained(directory, name) for name in dict.fromkeys(weight_map.values())}
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} of {len(paths)} shards named by {index_path.name} are missing: "
            f"{', '.join(missing[:5])}. Finish the download."
        )
    checkpoint = JoinedFiles([open_file(path) for path in paths.values()], directory)
    for tensor, file_name in weight_map.items():
        if checkpoint.path_of(tensor) != paths[file_name]:
            raise CheckpointError(
                f"{index_path} places tensor {tensor!r} in {file_name}, which does not hold it. The index and the "
                "shards come from different exports."
            )
    return checkpoint

"""`dew convert`: read a checkpoint in any format and write it as a Hugging Face directory.

Entry point: `convert_checkpoint`.
"""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from dew.placement.memory import bytes_per_device, format_bytes
from dew.pretrained.export import save_pretrained
from dew.pretrained.load import load_pretrained


def convert_checkpoint(
    source: Positional[str],
    out: Positional[Path],
    dtype: str | None = None,
    max_shard_bytes: float = 5e9,
    revision: str | None = None,
) -> int:
    """Load a checkpoint and write it as a directory that transformers reads.

    Args:
        source: Directory, .gguf file or Hub name.
        out: Directory to write; written whole or not at all.
        dtype: Dtype to write; by default the checkpoint's, float32 for GGUF.
        max_shard_bytes: Largest weight file.
        revision: Branch, tag or commit of a repository.

    Returns:
        0.

    Raises:
        ValueError: If the output exists already, or the checkpoint cannot be read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already. Give a directory that is new or empty.")
    loaded = load_pretrained(source, dtype=dtype, revision=revision)
    written = save_pretrained(
        out,
        loaded.module,
        loaded.variables,
        loaded.config,
        loaded.tokenizer,
        loaded.generation_config,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    print(f"Wrote {format_bytes(bytes_per_device(loaded.variables))} of weights to {written}")
    return 0

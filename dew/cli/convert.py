"""`dew convert`: read a checkpoint in any format, or a training run, and write it as a Hugging Face directory.

Entry point: `convert_checkpoint`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jax
from tyro.conf import Positional, arg

from dew.checkpoint import Checkpoints
from dew.checkpoint.manifest import shapes_on
from dew.nn.sharding import unboxed
from dew.placement.layout import Layout
from dew.placement.memory import bytes_per_device, format_bytes
from dew.placement.mesh import as_mesh
from dew.placement.stacks import stack_view
from dew.pretrained.export import save_pretrained
from dew.pretrained.load import PretrainedConfig, abstract_variables, describe, load_variables
from dew.tree import named_leaves, nested

_PARAMS = "variables/params"


def convert_checkpoint(
    source: Positional[str],
    out: Positional[Path],
    dtype: str | None = None,
    max_shard_bytes: float = 5e9,
    revision: str | None = None,
    allow_pickle: Annotated[bool, arg(help="Read pickled .bin weights, as tensors only.")] = False,
    model: str | None = None,
    step: int | None = None,
    prediction_layers: bool = True,
) -> int:
    """Load a checkpoint and write it as a directory that transformers reads.

    Args:
        source: Directory, .gguf file or Hub name; with --model, the directory of a run's checkpoints.
        out: Directory to write; written whole or not at all.
        dtype: Dtype to write; by default the checkpoint's, float32 for GGUF.
        max_shard_bytes: Largest weight file.
        revision: Branch, tag or commit of a repository.
        allow_pickle: Read pickled .bin weights where there are no safetensors.
        model: Checkpoint that the run started from: its config and its tokenizer are written, with the run's weights.
        step: Step of the run; by default the newest.
        prediction_layers: Write the layers that predict further tokens, where the checkpoint, or the run, has such.

    Returns:
        0.

    Raises:
        ValueError: If the output exists already, or the checkpoint cannot be read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already. Give a directory that is new or empty.")
    if model is None:
        if step is not None:
            raise ValueError(f"--step is for a run; name the checkpoint it started from with --model. Received: {step}")
        if _is_run(Path(source)):
            raise ValueError(
                f"{source} holds the checkpoints of a run, which say nothing about the model: name the checkpoint that "
                "it started from with --model."
            )
        described = describe(
            source, revision=revision, dtype=dtype, allow_pickle=allow_pickle, prediction_layers=prediction_layers
        )
        variables = load_variables(described, mesh=as_mesh(None), layout=Layout(), param_dtype=dtype)
    else:
        described = describe(model, revision=revision, prediction_layers=prediction_layers)
        variables = _run_variables(Path(source), step, described)
    written = save_pretrained(
        out,
        described.module,
        variables,
        described.config,
        described.tokenizer,
        described.generation_config,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    print(f"Wrote {format_bytes(bytes_per_device(variables))} of weights to {written}")
    return 0


def _is_run(directory: Path) -> bool:
    """Tell a directory of numbered steps from a checkpoint."""
    return (
        directory.is_dir()
        and not (directory / "config.json").exists()
        and any((entry / "manifest").is_dir() for entry in directory.iterdir() if entry.name.isdigit())
    )


def _run_variables(directory: Path, step: int | None, described: PretrainedConfig) -> dict[str, Any]:
    """Read the weights of a run, without the rest of its state, in the dtypes in which it kept them."""
    checkpoints = Checkpoints(directory)
    try:
        stored = checkpoints.manifest(step).branch(_PARAMS).leaves
        mesh, view = as_mesh(None), stack_view(described.module)
        abstract = abstract_variables(described.module)
        shapes = {}
        for path, leaf in named_leaves(unboxed(abstract)["params"]).items():
            _, dtype = stored.get(view.logical_paths(path)[0], ((), leaf.dtype))
            shapes[path] = jax.ShapeDtypeStruct(leaf.shape, dtype)
        template = shapes_on(nested(shapes), Layout().shardings(mesh, abstract)["params"])
        return {"params": checkpoints.restore(template, stacks=view, step=step, part=_PARAMS)}
    finally:
        checkpoints.close()

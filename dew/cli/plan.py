"""`dew plan`: what each device would hold of a checkpoint on a mesh, from its config alone.

Entry point: `plan_checkpoint`.
"""

from __future__ import annotations

from typing import Annotated

from tyro.conf import Positional, arg

from dew.cli.words import byte_count, mesh_factors
from dew.nn.attention_report import accelerator_named
from dew.parallel.schedules import ScheduleName
from dew.placement.layout import Layout
from dew.planning import estimate_bytes, plan_text, planned_mesh
from dew.pretrained.load import describe


def plan_checkpoint(
    source: Positional[str],
    mesh: str = "",
    devices: int | None = None,
    optimizer: str = "adamw",
    rows: int | None = None,
    length: int | None = None,
    accumulation: int = 1,
    dtype: str | None = None,
    device_memory: str | None = None,
    accelerator: str | None = None,
    schedule: ScheduleName = "gpipe",
    min_shard: int = 2**16,
    revision: str | None = None,
    prediction_layers: bool = True,
    table: Annotated[bool, arg(help="List every leaf.")] = False,
) -> int:
    """Print the bytes per device of a checkpoint's weights, gradients, optimizer state and cache on a mesh.

    Args:
        source: Directory, .gguf file or Hub name; its config is read, and of its weights the names at most.
        mesh: Axes and factors, as in fsdp=4,tensor=2.
        devices: How many devices there will be; by default those that the mesh names.
        optimizer: Name of the optimizer.
        rows: Global rows to generate at once; by default one per row shard.
        length: Tokens of a row, prompt and reply; by default the model's longest context.
        accumulation: Batches per optimizer update.
        dtype: Dtype of the weights to generate with; by default the checkpoint's.
        device_memory: Memory of one device, as in 80GB or 16GiB.
        accelerator: What the devices are, for the choice of attention kernels: cpu, tpu, rocm, cuda:9.0; by default
            those of this machine.
        schedule: Order of the microbatches where the mesh has stages.
        min_shard: Smallest leaf that is split, in elements.
        revision: Branch, tag or commit of a repository.
        prediction_layers: Count the layers that predict further tokens, where the checkpoint has such.
        table: List every leaf.

    Returns:
        0, or 1 when the layout, or rows of that length, are refused on this mesh.
    """
    planned = planned_mesh(mesh_factors(mesh), devices)
    memory = None if device_memory is None else byte_count(device_memory)
    described = describe(source, revision=revision, dtype=dtype, prediction_layers=prediction_layers)
    module = described.module.clone(schedule=schedule)
    estimate = estimate_bytes(
        module,
        planned,
        Layout(min_shard=min_shard),
        optimizer=optimizer,
        rows=rows,
        slots=length,
        accumulation=accumulation,
        device=None if accelerator is None else accelerator_named(accelerator),
    )
    print(plan_text(estimate, device_bytes=memory, table=table))
    return 0 if estimate.refusal is None else 1

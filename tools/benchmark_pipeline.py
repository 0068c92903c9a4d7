"""Measure the pipeline schedules: idle share, temporaries and step time by schedule, microbatches and stages.

Run `python tools/benchmark_pipeline.py`; it prints the table of docs/pipelines.md. On simulated devices the step time
counts work, not waiting: an idle stage computes what nobody reads, so the time falls with the idle share as it would on
real devices.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
import tyro

if "jax" not in sys.modules:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        stages: Stages of the meshes; the other devices go to fsdp.
        microbatches: Microbatches of a step; those that are fewer than the stages are left out.
        rows: Rows of a microbatch on a device.
        length: Positions of a row.
        layers: Blocks, a multiple of every number of stages.
        width: Model width.
        vocab: Vocabulary size.
        remat: Recomputation policy.
        samples: Timed steps, after one that is not; 0 compiles only.
        total_rows: Rows on a device, cut into the microbatches; 0 takes `rows` for each microbatch.
    """

    stages: tuple[int, ...] = (2, 4, 8)
    microbatches: tuple[int, ...] = (4, 8, 16, 32)
    rows: int = 1
    length: int = 64
    layers: int = 8
    width: int = 64
    vocab: int = 256
    remat: str | None = None
    samples: int = 5
    total_rows: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One schedule on one mesh.

    Attributes:
        schedule: Its name.
        stages: Stages.
        microbatches: Microbatches.
        idle: Share of the stages' time in which they are idle, by the timetable.
        computed_idle: The same share, of the operations that the compiled step does for the blocks.
        temporary_bytes: Temporaries of a step on one device.
        milliseconds: Step times.
        tokens: Tokens of a step.
    """

    schedule: str
    stages: int
    microbatches: int
    idle: float
    computed_idle: float
    temporary_bytes: int
    milliseconds: tuple[float, ...]
    tokens: int

    def row(self) -> str:
        """Write the measurement as a line of a Markdown table."""
        times = "- | -"
        if self.milliseconds:
            middle, low, high = statistics.median(self.milliseconds), min(self.milliseconds), max(self.milliseconds)
            times = f"{middle:.0f} ({low:.0f}-{high:.0f}) | {1000 * middle / self.tokens:.1f}"
        size = f"{self.temporary_bytes / 2**20:.2f}"
        idle = f"{self.idle:.1%} | {self.computed_idle:.1%}"
        return f"| {TITLES[self.schedule]} | {self.stages} | {self.microbatches} | {idle} | {size} | {times} |"


TITLES = {"gpipe": "GPipe", "1f1b": "1F1B"}
HEADER = (
    "| schedule | stages | microbatches | idle | idle, of the operations | temporaries, MiB per device | "
    "step, ms: median (range) | microseconds per token |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def trainer_of(options: Options, schedule: str, stages: int, microbatches: int) -> Any:
    """Build the trainer of one measurement."""
    import jax

    import dew
    from dew.nn.attention import AttentionSpec
    from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
    from dew.nn.mlp import MlpSpec
    from dew.nn.norm import NormSpec
    from dew.nn.rope import RotarySpec
    from dew.objectives.language import LanguageModel

    norm, heads = NormSpec(eps=1e-5), options.width // 16
    attention = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=16, rotary=RotarySpec(theta=10000.0))
    layer = LayerSpec(mixer=attention, mlp=MlpSpec(features=3 * options.width), norm=norm)
    module = CausalTransformer(
        vocab_size=options.vocab,
        features=options.width,
        layers=(layer,) * options.layers,
        norm=norm,
        max_length=options.length,
        remat=options.remat,
        schedule=schedule,
    )
    mesh = dew.MeshSpec(stage=stages, microbatches=microbatches, fsdp=len(jax.devices()) // stages)
    return dew.Trainer(LanguageModel(module), "adamw", mesh=mesh)


def measure(options: Options, schedule: str, stages: int, microbatches: int) -> Measurement:
    """Compile one step, read its memory and time it.

    Args:
        options: What to measure.
        schedule: Name of the schedule.
        stages: Stages.
        microbatches: Microbatches.
    """
    from dew.parallel.schedules import SCHEDULES
    from dew.placement.mesh import batch_divisor

    trainer = trainer_of(options, schedule, stages, microbatches)
    rows = batch_divisor(trainer.mesh) * (options.total_rows or options.rows * microbatches)
    batch = {"tokens": np.random.default_rng(0).integers(0, options.vocab, (rows, options.length + 1))}
    compiled = trainer.lower(batch).compile()
    times = _step_times(trainer, batch, options.samples) if options.samples else ()
    table = SCHEDULES[schedule].timetable(stages, microbatches)
    return Measurement(
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        idle=table.bubble(),
        computed_idle=_computed_idle(options, trainer, compiled.as_text(), rows),
        temporary_bytes=int(compiled.memory_analysis().temp_size_in_bytes),
        milliseconds=times,
        tokens=rows * options.length,
    )


def _computed_idle(options: Options, trainer: Any, text: str, rows: int) -> float:
    """Give the share of the blocks' operations that an even split over the devices would not do."""
    from flax import linen as nn

    from dew.planning.flops import decoder_step_flops, program_flops

    module, devices = trainer.objective.module, trainer.mesh.size
    variables = nn.meta.unbox(trainer.abstract_variables())
    head = 6 * rows * options.length * options.vocab * options.width
    blocks = decoder_step_flops(module, variables, rows=rows, length=options.length) - head
    passes, ends = _recomputation(options, module.schedule, trainer.mesh.shape["stage"])
    last = 2 * rows * options.length * options.width * module.layers[0].mlp.features * options.layers
    computed = blocks * (1 + passes / 3) - last * ends
    return 1 - computed / (program_flops(text) * devices - head)


def _recomputation(options: Options, schedule: str, stages: int) -> tuple[int, int]:
    """Say how often a step runs the blocks forward again, and in how many of these times without their last product.

    1F1B runs a stage again, `remat="full"` a block; nothing that goes back reads what ends either of them. Where a
    stage is one block, both are the same.
    """
    by_stage, by_block = schedule == "1f1b", options.remat == "full"
    if options.layers == stages:
        return int(by_stage or by_block), int(by_stage or by_block)
    return by_stage + by_block, int(by_block)


def _step_times(trainer: Any, batch: dict[str, np.ndarray], samples: int) -> tuple[float, ...]:
    import jax

    loop, times = trainer.loop(trainer.place()), []
    for _ in range(samples + 1):
        begin = time.perf_counter()
        jax.block_until_ready(loop.step(batch).applied)
        times.append(1000 * (time.perf_counter() - begin))
    return tuple(times[1:])


def main(options: Options) -> None:
    """Print the table."""
    print(HEADER, flush=True)
    for schedule in ("gpipe", "1f1b"):
        for stages in options.stages:
            for microbatches in (count for count in options.microbatches if count >= stages):
                print(measure(options, schedule, stages, microbatches).row(), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

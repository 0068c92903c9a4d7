"""Measure the pipeline schedules: idle share, temporaries and step time by schedule, microbatches and stages.

Run `python tools/benchmark_pipeline.py`. On simulated devices the step time counts work, not waiting: an idle stage
computes what nobody reads, so the time falls with the idle share as it would on real devices.
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
        microbatches: Microbatches for the smallest and the largest number of stages; multiples of all.
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
    microbatches: tuple[int, ...] = (8, 16, 32)
    rows: int = 1
    length: int = 64
    layers: int = 8
    width: int = 64
    vocab: int = 256
    remat: str | None = None
    samples: int = 3
    total_rows: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One schedule on one mesh.

    Attributes:
        schedule: Its name.
        stages: Stages.
        microbatches: Microbatches.
        idle: Share of the stages' time in which they are idle.
        temporary_bytes: Temporaries of a step on one device.
        milliseconds: Step times.
        tokens: Tokens of a step.
    """

    schedule: str
    stages: int
    microbatches: int
    idle: float
    temporary_bytes: int
    milliseconds: tuple[float, ...]
    tokens: int

    def row(self) -> str:
        """Write the measurement as a line of a Markdown table."""
        times = "-"
        if self.milliseconds:
            middle, low, high = statistics.median(self.milliseconds), min(self.milliseconds), max(self.milliseconds)
            times = f"{middle:.0f} ({low:.0f}-{high:.0f}) | {1000 * middle / self.tokens:.1f}"
        size = f"{self.temporary_bytes / 2**20:.2f}"
        return f"| {self.schedule} | {self.stages} | {self.microbatches} | {self.idle:.1%} | {size} | {times} |"


HEADER = (
    "| schedule | stages | microbatches | idle | temporaries, MiB per device | step, ms | microseconds per token |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
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
    from dew.parallel.schedules import gpipe_timetable, one_f_one_b_timetable
    from dew.placement.mesh import batch_divisor

    trainer = trainer_of(options, schedule, stages, microbatches)
    rows = batch_divisor(trainer.mesh) * (options.total_rows or options.rows * microbatches)
    batch = {"tokens": np.random.default_rng(0).integers(0, options.vocab, (rows, options.length + 1))}
    memory = trainer.lower(batch).compile().memory_analysis()
    times = _step_times(trainer, batch, options.samples) if options.samples else ()
    table = {"gpipe": gpipe_timetable, "1f1b": one_f_one_b_timetable}[schedule](stages, microbatches)
    return Measurement(
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        idle=table.bubble(),
        temporary_bytes=int(memory.temp_size_in_bytes),
        milliseconds=times,
        tokens=rows * options.length,
    )


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
            for microbatches in options.microbatches:
                print(measure(options, schedule, stages, microbatches).row(), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

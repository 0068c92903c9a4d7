"""Compile and step time of a training step against its depth, with banks of layers scanned and with layers unrolled.

Run `python tools/benchmark_scan.py`. Nothing is read from or written to a compilation cache, and XLA optimises at its
default level. The bar: scanned, the compile time grows by at most a quarter from 8 to 64 layers; beyond it the program
ends with status 1.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
import tyro

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec
from dew.objectives.language import LanguageModel
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.trainer import Trainer

BAR = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        depths: Numbers of layers.
        unrolled: The largest depth that is also compiled without scanning.
        width: Model width.
        length: Positions of a row.
        rows: Rows of a batch.
        vocab: Vocabulary size.
        compiles: How often each step is traced and compiled; the median counts.
        samples: Timed steps, after one that is not.
    """

    depths: tuple[int, ...] = (4, 8, 16, 32, 64)
    unrolled: int = 64
    width: int = 128
    length: int = 64
    rows: int = 2
    vocab: int = 512
    compiles: int = 3
    samples: int = 5


def trainer_of(options: Options, depth: int, *, is_scanned: bool) -> Trainer:
    """Build the trainer of one measurement, on one device."""
    norm, heads = NormSpec(eps=1e-5), options.width // 32
    attention = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=32, rotary=RotarySpec(theta=10000.0))
    layer = LayerSpec(mixer=attention, mlp=MlpSpec(features=3 * options.width), norm=norm)
    module = CausalTransformer(
        vocab_size=options.vocab,
        features=options.width,
        layers=(layer,) * depth,
        norm=norm,
        max_length=options.length,
        scan_layers=is_scanned,
    )
    mesh = build_mesh(MeshSpec(), jax.devices()[:1])
    return Trainer(LanguageModel(module), "adamw", mesh=mesh)


def measure(options: Options, depth: int, *, is_scanned: bool) -> tuple[list[float], list[float]]:
    """Time one step.

    Args:
        options: What to measure.
        depth: Layers.
        is_scanned: Whether like layers are stored in banks and scanned.

    Returns:
        Seconds to trace and compile the whole step, milliseconds to run it.
    """
    batch = {"tokens": np.random.default_rng(0).integers(0, options.vocab, (options.rows, options.length + 1))}
    compiles = []
    for _ in range(options.compiles if is_scanned else 1):
        jax.clear_caches()
        trainer = trainer_of(options, depth, is_scanned=is_scanned)
        begin = time.perf_counter()
        trainer.lower(batch).compile()
        compiles.append(time.perf_counter() - begin)
    return compiles, _step_times(trainer, batch, options.samples)


def _step_times(trainer: Any, batch: dict[str, np.ndarray], samples: int) -> list[float]:
    loop, times = trainer.loop(trainer.place()), []
    for _ in range(samples + 1):
        begin = time.perf_counter()
        jax.block_until_ready(loop.step(batch).applied)
        times.append(1000 * (time.perf_counter() - begin))
    return times[1:]


def main(options: Options) -> int:
    """Print the table, and by how much the scanned step's compile time grows from 8 to 64 layers.

    Returns:
        1 where it grows by more than the bar, else 0.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    print("| layers | compile, s, scanned | unrolled | step, ms, scanned | unrolled |\n| --- | --- | --- | --- | --- |")
    medians = {}
    for depth in options.depths:
        compiled, steps = measure(options, depth, is_scanned=True)
        medians[depth] = statistics.median(compiled)
        cells = [f"{medians[depth]:.2f} ({min(compiled):.2f}-{max(compiled):.2f})", "-", _median(steps), "-"]
        if depth <= options.unrolled:
            compiled, steps = measure(options, depth, is_scanned=False)
            cells[1], cells[3] = f"{compiled[0]:.2f}", _median(steps)
        print(f"| {depth} | {' | '.join(cells)} |", flush=True)
    if 8 not in medians or 64 not in medians:
        return 0
    growth = medians[64] / medians[8]
    print(f"scanned, from 8 to 64 layers: x{growth:.2f} (bar: x{BAR})")
    return int(growth > BAR)


def _median(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

"""Time greedy generation beside loops written by hand: `python tools/benchmark_generate.py --samples 7`.

Same weights, same prompts, one run; samples are interleaved and medians compared. The bar is 0.95 of the tokens per
second of the faster of the handwritten scan and unrolled loops, float32, one device, the shapes of SmolLM2-135M. Below
it the program ends with status 1.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from benchmark_train import decoder
from handwritten_llama import Shape, generate_function, weights_from

from dew.inference import generate
from dew.placement.mesh import MeshSpec, build_mesh
from dew.pretrained.load import abstract_variables

BAR = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to time.

    Attributes:
        layers: Layers; 30 is the whole model.
        vocab: Vocabulary; 49152 is the whole model's.
        rows: Rows of a call, timed one after the other.
        prompt: Tokens of each prompt.
        new_tokens: Tokens each row gets.
        samples: Timed calls of each contender, after one that is not.
        only: Contenders to run; all when empty.
    """

    layers: int = 30
    vocab: int = 49152
    rows: tuple[int, ...] = (1, 8)
    prompt: int = 32
    new_tokens: int = 64
    samples: int = 7
    only: tuple[str, ...] = ()


def random_variables(module: Any) -> Any:
    """Draw weights on the host: large enough that greedy continuations wander, as a trained model's do."""
    generator = np.random.default_rng(0)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def drawn(box: Any) -> jax.Array:
        shape = box.value.shape
        if box.names[-1:] == ("norm",):
            return jax.device_put(np.ones(shape, np.float32), whole)
        return jax.device_put(generator.standard_normal(shape, np.float32) * np.float32(0.05), whole)

    return jax.tree.map(drawn, abstract_variables(module), is_leaf=lambda leaf: hasattr(leaf, "names"))


def contenders(shape: Shape, options: Options, prompts: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    """Make the contenders: functions that generate once and give the new tokens on the host."""
    module = decoder(shape)
    variables = random_variables(module)

    def handwritten(*, stacked: bool) -> Callable[[], np.ndarray]:
        weights = weights_from(variables["params"], shape, stacked=stacked)
        function = generate_function(shape, options.new_tokens)
        return lambda: np.asarray(function(weights, jnp.asarray(prompts)))

    def dew() -> np.ndarray:
        return np.asarray(generate(module, variables, prompts.tolist(), max_new_tokens=options.new_tokens).tokens)

    made = {
        "handwritten scan": lambda: handwritten(stacked=True),
        "handwritten unrolled": lambda: handwritten(stacked=False),
        "dew": lambda: dew,
    }
    return {name: make() for name, make in made.items() if not options.only or name in options.only}


def compare(shape: Shape, options: Options, rows: int) -> float:
    """Print the table of one number of rows; return our tokens per second over the faster floor's."""
    prompts = np.random.default_rng(rows).integers(0, shape.vocab, (rows, options.prompt)).astype(np.int32)
    chosen = contenders(shape, options, prompts)
    first, tokens = {}, {}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    # On a busy machine the processor time of all threads is the steadier column.
    worked: dict[str, list[float]] = {name: [] for name in chosen}
    for name, sample in chosen.items():
        began = time.perf_counter()
        tokens[name] = sample()
        first[name] = time.perf_counter() - began
    for _ in range(options.samples):
        for name, sample in chosen.items():
            began, busy = time.perf_counter(), time.process_time()
            sample()
            times[name].append(time.perf_counter() - began)
            worked[name].append(time.process_time() - busy)
    base = next(iter(tokens.values()))
    print(f"{rows} rows{'':16}  median s     min     max  processor s  tokens/s  first call s  tokens equal")
    for name, seconds in times.items():
        rate = rows * options.new_tokens / statistics.median(seconds)
        same = f"{np.mean(tokens[name] == base):.3f}"
        print(
            f"{name:22}  {statistics.median(seconds):8.3f}  {min(seconds):6.3f}  {max(seconds):6.3f}  "
            f"{statistics.median(worked[name]):11.3f}  {rate:8.1f}  {first[name]:12.1f}  {same:>12}"
        )
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    floor = min((value for name, value in medians.items() if name != "dew"), default=float("nan"))
    ratio = floor / medians.get("dew", float("nan"))
    print(f"dew / faster handwritten, tokens per second: {ratio:.3f} (bar {BAR})\n")
    return ratio


def ratios(options: Options) -> list[float]:
    """Print a table per number of rows, and give our rate over the handwritten one's for each."""
    shape = Shape(layers=options.layers, vocab=options.vocab)
    return [compare(shape, options, rows) for rows in options.rows]


def main(options: Options) -> int:
    """Compare; return 1 where a ratio is below the bar, else 0."""
    return int(any(ratio < BAR for ratio in ratios(options)))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))

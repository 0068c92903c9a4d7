"""Time a training step beside one written by hand: same weights, same tokens, same AdamW, one run.

`python tools/benchmark_train.py --samples 7` interleaves the samples and compares medians. The bar is 1.05 times the
faster of the handwritten scan and unrolled steps: float32, one device, the shapes of SmolLM2-135M. Beyond it the
program ends with status 1.
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
from handwritten_llama import Shape, train_step, weights_from

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec
from dew.objectives.language import LanguageModel
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.optimizer import make_optimizer
from dew.training.trainer import Trainer

BAR = 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to time.

    Attributes:
        layers: Layers; 30 is the whole model.
        vocab: Vocabulary; 49152 is the whole model's.
        rows: Rows of a batch.
        length: Tokens the model reads per row.
        samples: Timed steps of each contender, after two that are not.
        only: Contenders to run; all when empty.
    """

    layers: int = 30
    vocab: int = 49152
    rows: int = 8
    length: int = 128
    samples: int = 7
    only: tuple[str, ...] = ()


def decoder(shape: Shape) -> CausalTransformer:
    """Build the module of the same sizes."""
    norm = NormSpec(eps=shape.eps)
    attention = AttentionSpec(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rotary=RotarySpec(theta=shape.theta),
    )
    layer = LayerSpec(mixer=attention, mlp=MlpSpec(features=shape.mlp), norm=norm)
    return CausalTransformer(
        vocab_size=shape.vocab, features=shape.width, layers=(layer,) * shape.layers, norm=norm, max_length=2048
    )


def handwritten(shape: Shape, params: Any, tokens: np.ndarray, *, stacked: bool) -> Callable[[], float]:
    """Make a contender: a function that takes one step and returns the loss."""
    start, step = train_step(shape, rate=1e-4, decay=0.01)
    state, batch = start(weights_from(params, shape, stacked=stacked)), jnp.asarray(tokens)

    def sample() -> float:
        nonlocal state
        state, loss = step(state, batch)
        return float(loss)

    return sample


def ours(trainer: Trainer, variables: Any, tokens: np.ndarray) -> Callable[[], float]:
    """Make the contender of the training loop, host batch included."""
    loop = trainer.loop(trainer.place(variables))

    def sample() -> float:
        return loop.step({"tokens": tokens}).read()["loss"].value()

    return sample


def compare(options: Options) -> float:
    """Print losses, medians and the ratio of our step to the faster handwritten one, which is returned."""
    shape = Shape(layers=options.layers, vocab=options.vocab)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1])
    trainer = Trainer(LanguageModel(decoder(shape)), make_optimizer("adamw", 1e-4, weight_decay=0.01), mesh=mesh)
    variables = trainer.place().variables
    tokens = np.random.default_rng(0).integers(0, shape.vocab, (options.rows, options.length + 1)).astype(np.int32)
    contenders = {
        "handwritten scan": lambda: handwritten(shape, variables["params"], tokens, stacked=True),
        "handwritten unrolled": lambda: handwritten(shape, variables["params"], tokens, stacked=False),
        "dew": lambda: ours(trainer, jax.tree.map(jnp.copy, variables), tokens),
    }
    chosen = {name: make() for name, make in contenders.items() if not options.only or name in options.only}
    losses: dict[str, list[float]] = {name: [sample(), sample()] for name, sample in chosen.items()}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    work: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(options.samples):
        for name, sample in chosen.items():
            began, used = time.perf_counter(), time.process_time()
            losses[name].append(sample())
            times[name].append(time.perf_counter() - began)
            work[name].append(time.process_time() - used)
    print(f"{'':22}  median s     min     max  CPU s  loss at step 1, 2, 3")
    for name, seconds in times.items():
        shown = " ".join(f"{loss:.6f}" for loss in losses[name][:3])
        spread = f"{statistics.median(seconds):8.3f}  {min(seconds):6.3f}  {max(seconds):6.3f}"
        print(f"{name:22}  {spread}  {statistics.median(work[name]):5.2f}  {shown}")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    floor = min((value for name, value in medians.items() if name != "dew"), default=float("nan"))
    ratio = medians.get("dew", float("nan")) / floor
    print(f"dew / faster handwritten: {ratio:.3f} (bar {BAR})")
    return ratio


def main(options: Options) -> int:
    """Compare; return 1 where the ratio is beyond the bar, else 0."""
    return int(compare(options) > BAR)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))

"""The law of meshes as a table: training on every factorisation of 8 devices is training on one device.

Run `python -m tools.mesh_law` for all of `tools/mesh_cases.py`, `--axis stage` for the meshes with stages, `--without
stage` for the others, `--part 1/4`, `--cover` for what the tests run. Compared in float32, leaf by leaf: loss, metrics,
gradients and weights of three updates on rows with odd documents, padding, unequal masks and parts that score nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import HeadSpec
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.norm import NormSpec
from dew.nn.prediction import PredictionSpec
from dew.nn.rope import RotarySpec
from dew.nn.router import BALANCE_BIAS, RouterSpec, RouterTraining
from dew.objectives.language import LanguageModel
from dew.objectives.routing import EXPERT_LOAD
from dew.placement import DEFAULT_RULES, Layout, LayoutRefused, MeshSpec, build_mesh
from dew.placement.rules import spec_axes
from dew.training.placing import plain
from dew.training.trainer import Trainer
from dew.tree import map_named, named_leaves
from tools.law_table import chosen, judged, table_parser, tally
from tools.mesh_cases import Case, Features, Way, cover, kept_whole, refused, whole_table

ROWS, LENGTH, VOCAB, EXPERTS = 16, 32, 64, 8
UPDATES = 3
ROUTERS = RouterTraining(balance_loss=0.5, z_loss=0.1)
BALANCED_ROUTERS = RouterTraining(balance_loss=0.5, z_loss=0.1, bias_rate=0.01)
DROPPED = 0.2
RTOL = 1e-5
"""Largest difference, relative to the largest element of the leaf on one device."""
UNSCORED = slice(8, 16)
"""Positions without a scored token in any row: a whole slice of a sequence axis of 4, two of an axis of 8."""
COUNTS = ("token_accuracy", "dropped_slots", EXPERT_LOAD)
"""Statistics that may be 0 on few tokens; what they are out of is not."""


def decoder(features: Features, layers: int, way: Way) -> CausalTransformer:
    """Build the decoder of a set of features: width 32, 8 query heads of 8, hidden width 64."""
    norm = NormSpec(eps=1e-5)
    attention = AttentionSpec(
        num_heads=8,
        num_kv_heads=4 if features.grouped else 8,
        head_dim=8,
        rotary=RotarySpec(theta=10000.0),
        window=5 if features.windowed else None,
        bias=features.dressed,
        out_bias=features.dressed,
        qk_norm=norm if features.dressed else None,
        softcap=20.0 if features.dressed else None,
    )
    layer = LayerSpec(
        mixer=attention,
        mlp=experts(features) if features.sparse else MlpSpec(features=64, bias=features.dressed),
        norm=norm,
        placement="both" if features.dressed else "pre",
        residual_scale=0.05 if features.sparse else 1.0,  # see `initial_values`
    )
    return CausalTransformer(
        VOCAB,
        32,
        (layer,) * layers,
        norm,
        head=HeadSpec(scale=0.25 if features.sparse else 1.0),
        tie_embeddings=not features.untied,
        remat="full" if features.remat else None,
        scan_layers=features.scanned,
        max_length=LENGTH,
        sequence_impl=way.exchange or "auto",
        schedule=way.schedule or "gpipe",
        router_training=router_training(features),
        prediction=PredictionSpec(layer=layer, depth=2, is_shared=features.dressed) if features.predicting else None,
        dropout_rate=DROPPED if features.dressed else 0.0,
        # Dropped, the dimensions in which a token names its experts would leave the choice to rounding.
        embedding_dropout_rate=DROPPED if features.dressed and not features.sparse else 0.0,
        attention_dropout_rate=DROPPED if features.dressed else 0.0,
    )


def router_training(features: Features) -> RouterTraining:
    """Say what trains the routers of a set of features: rates move balance biases, which plain routers alone have."""
    if not features.sparse:
        return RouterTraining()
    return ROUTERS if features.dressed else BALANCED_ROUTERS


def experts(features: Features) -> ExpertsSpec:
    """Build the experts of a set of features."""
    if not features.dressed:
        router = RouterSpec(top_k=2, score="sigmoid", normalise=True, balance_bias=True, groups=4, top_groups=2)
        return ExpertsSpec(num_experts=EXPERTS, features=64, router=router)
    return ExpertsSpec(
        num_experts=EXPERTS,
        features=64,
        router=RouterSpec(top_k=2, bias=True),
        bias=True,
        shared=MlpSpec(features=64, bias=True),
        shared_gate=True,
        capacity_factor=1.25,
    )


# Ends of the documents of each row of 33 tokens; what follows the last end is padding. Slices end at multiples of 4.
_ENDS = (
    *((7, 12, 15, 16, 33), (33,), (5, 8, 13, 24, 28, 33), (9, 24, 27), (1, 2, 3, 32), (5, 16, 21), (24, 25, 33)),
    *((17, 33), (4, 9, 20, 33), (3, 8, 31), (12, 13), (2, 5, 32, 33), (6, 28, 29), (11, 16, 20, 23, 33), (8, 33), ()),
)


def batch(features: Features, seed: int) -> dict[str, np.ndarray]:
    """Draw rows with a mask that scores a different number of tokens in each, none in the last two."""
    generator = np.random.default_rng(seed)
    shape = (ROWS, LENGTH + 1)
    tokens = generator.integers(1, VOCAB, shape).astype(np.int32)
    mask = generator.random(shape) < np.linspace(0.3, 1.0, ROWS)[:, None]
    mask[-2:] = False
    mask[:, UNSCORED.start + 1 : UNSCORED.stop + 1] = False
    if not features.packed:
        return {"tokens": tokens, "loss_mask": mask}
    segments = np.zeros(shape, np.int32)
    for row, ends in enumerate(_ENDS):
        for number, (start, end) in enumerate(itertools.pairwise((0, *ends))):
            segments[row, start:end] = number + 1
    return {"tokens": tokens, "loss_mask": mask, "segment_ids": segments}


class RecordedGradient(NamedTuple):
    """The gradient of the last update."""

    gradient: Any


def record_gradient() -> optax.GradientTransformation:
    """Keep each gradient in the optimizer's state, so that one program gives gradients and updates."""
    return optax.GradientTransformation(
        lambda params: RecordedGradient(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, RecordedGradient(updates)),
    )


def trainer_of(case: Case, tolerance: float = 0.0) -> Trainer:
    """Build the trainer of a case."""
    return _trainer(decoder(case.features, case.layers, case.way), case.features, case.spec, tolerance)


def _trainer(module: CausalTransformer, features: Features, mesh: Any, tolerance: float) -> Trainer:
    # A large eps: Adam divides by the gradient's own size, which would magnify rounding where that is near 0.
    optimizer = optax.chain(record_gradient(), optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-2))
    objective = LanguageModel(module, mtp_weight=0.5 if features.predicting else None)
    batches = 2 if features.accumulated else 1
    return Trainer(objective, optimizer, mesh=mesh, layout=layout(features, tolerance), accumulation=batches)


def layout(features: Features, tolerance: float) -> Layout:
    """Give the layout of a set of features, under which every matrix is split that can be."""
    # No default rule splits what a router scores with over tensor: it is small.
    rules = (*DEFAULT_RULES, ("router", "tensor")) if features.sparse else DEFAULT_RULES
    return Layout(rules=rules, min_shard=1, tolerance=tolerance)


def initial_values(shapes: Any, features: Features) -> Any:
    """Draw weights on the host: normal matrices, scales and biases around one and zero.

    A choice of experts is a step: two scores that rounding could swap would make any comparison a matter of luck. So
    each token names its experts in the first dimensions of its row of the table, the router reads these, and the blocks
    (`residual_scale`) change them little; so do projections of further tokens, which hand these dimensions on. Some
    experts are named far more often than others.
    """
    generator = np.random.default_rng(0)
    tokens, dims = np.arange(VOCAB), np.arange(EXPERTS)
    first = tokens**2 % EXPERTS
    second = (first + 1 + tokens % (EXPERTS - 1)) % EXPERTS

    def draw(path: str, leaf: Any) -> np.ndarray:
        values = generator.normal(0, 0.15, leaf.shape).astype(np.float32)
        if path.endswith("scale"):
            return values + 1
        if "/router/" in path:
            values *= 0.1
        if path.endswith("router/kernel"):
            values[..., dims, dims] += 0.5
        if features.sparse and path.endswith("/proj/kernel"):
            values *= 0.1
            values[0, dims, dims] += 0.5
        if features.sparse and path.endswith("embed_tokens/embedding"):
            values[tokens, first] += 2
            values[tokens, second] += 2
        return values

    return map_named(draw, shapes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What three updates gave, by name.

    Attributes:
        numbers: Totals and masses of loss and metrics, gradients of each update, the weights at the end.
        state: The state at the end, placed.
        placed: One batch, placed.
    """

    numbers: dict[str, np.ndarray]
    state: Any
    placed: Any


def trained(trainer: Trainer, features: Features) -> Trained:
    """Train three updates."""
    loop = trainer.loop(trainer.place(initial_values(plain(trainer.abstract_variables()), features)))
    numbers: dict[str, np.ndarray] = {}
    for number in range(UPDATES):
        seeds = range(number * trainer.accumulation, (number + 1) * trainer.accumulation)
        for seed, result in zip(seeds, loop.run(batch(features, seed) for seed in seeds), strict=True):
            for name, ratio in result.read().items():
                numbers[f"batch {seed} {name}"] = np.asarray(ratio.total)
                numbers[f"batch {seed} {name} mass"] = np.asarray(ratio.mass)
        gradient = next(part for part in loop.state.opt_state if isinstance(part, RecordedGradient)).gradient
        leaves = {path: leaf for path, leaf in _on_host(gradient).items() if not path.endswith(BALANCE_BIAS)}
        numbers |= {f"update {number} gradient of {path}": leaf for path, leaf in leaves.items()}
    numbers |= {f"weights {path}": leaf for path, leaf in _on_host(loop.state.params).items()}
    return Trained(numbers=numbers, state=loop.state, placed=trainer.place_batch(batch(features, 0)))


def _on_host(tree: Any) -> dict[str, np.ndarray]:
    return named_leaves(jax.device_get(tree))


@functools.cache
def one_device(features: Features, layers: int) -> dict[str, np.ndarray]:
    """Give the numbers of one device."""
    alone = build_mesh(MeshSpec(), jax.devices()[:1])
    return trained(_trainer(decoder(features, layers, Way()), features, alone, 0.0), features).numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a case compares with one device.

    Attributes:
        case: The case.
        errors: Largest difference of each number, relative to the number's largest element.
        unsplit: Matrices and batch arrays that are not split over every axis they should be.
        seconds: Time it took.
    """

    case: Case
    errors: dict[str, float]
    unsplit: list[str]
    seconds: float

    @property
    def worst(self) -> tuple[str, float]:
        """The number that differs most."""
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def holds(self) -> bool:
        """Whether the law holds."""
        return self.worst[1] <= RTOL and not self.unsplit

    @property
    def words(self) -> str:
        """The worst error and where it is."""
        return f"{self.worst[1]:.1e} {self.worst[0]}"

    @property
    def defects(self) -> list[str]:
        """What is whole, a line each."""
        return [f"whole: {path}" for path in self.unsplit]


def judge(case: Case) -> Verdict:
    """Train a case and compare it with one device.

    Raises:
        LayoutRefused: If the layout leaves a matrix whole that `kept_whole` does not name.
        AssertionError: If a leaf is zero on one device, so that nothing could be seen to differ.
    """
    start = time.perf_counter()
    want = one_device(case.features, case.layers)
    got = trained(trainer_of(case, 1.0 if kept_whole(case) else 0.0), case.features)
    assert got.numbers.keys() == want.keys(), "the same numbers"
    errors = {}
    for name, values in want.items():
        scale = np.max(np.abs(want[f"{name} mass"] if name.split()[-1] in COUNTS else values))
        assert scale > 0, f"{name} is zero on one device"
        errors[name] = float(np.max(np.abs(got.numbers[name] - values)) / scale)
        if not np.all(np.isfinite(got.numbers[name])):
            errors[name] = math.inf
    return Verdict(case=case, errors=errors, unsplit=list(_unsplit(case, got)), seconds=time.perf_counter() - start)


def _unsplit(case: Case, got: Trained) -> Iterator[str]:
    """Name what is not split over all axes that should split it."""
    state = got.state
    held = {"params": state.params, "optimizer": state.opt_state, "window": state.accumulator}
    for path, leaf in named_leaves(held).items():
        wanted, found = wanted_axes(case, path), set(spec_axes(leaf.sharding.spec))
        if wanted is not None and found != wanted:
            yield f"{path} {leaf.shape} over {sorted(found)}, not {sorted(wanted)}"
    part = (ROWS // case.factors.row_shards, LENGTH // case.factors.sequence)
    for name, array in got.placed.items():
        if (shape := array.sharding.shard_shape(array.shape)) != part:
            yield f"batch {name} in parts of {shape}, not {part}"


def wanted_axes(case: Case, path: str) -> set[str] | None:
    """Say which axes split a matrix, its gradient and its moments; None for what is no matrix."""
    of_experts = "/experts/" in path and not path.endswith("_bias")
    if not of_experts and not path.endswith(("kernel", "embedding")):
        return None
    axes = {"fsdp", "tensor"}
    axes |= {"expert"} if of_experts else set()
    axes |= {"stage"} if "layers_" in path or path.endswith("embedding") else set()
    if "/shared_gate/" in path:  # one column
        axes.remove("tensor")
    if case.features.grouped and case.factors.tensor == 8 and ("k_proj" in path or "v_proj" in path):
        axes.remove("tensor")
    sizes = case.factors._asdict()
    return {axis for axis in axes if sizes[axis] > 1}


def refusal(case: Case) -> str:
    """Give the text with which a case of `refused` or `kept_whole` is refused, or the empty string."""
    try:
        trainer_of(case, 1.0 if refused(case) else 0.0).lower(batch(case.features, 0))
    except LayoutRefused as error:
        return str(error)
    return ""


def report(case: Case) -> tuple[str, float]:
    """Run a case, or have it refused, and print a line.

    Returns:
        Whether it "holds", is "refused" as listed or "FAILS", and how far it is from one device.
    """
    if (reason := refused(case)) is not None:
        given = refusal(case)
        state = "refused" if reason in given else "FAILS"
        print(f"{state:7} {case}: {given or 'it runs'}", flush=True)
        return state, 0.0
    verdict = judged(case, judge)
    return ("FAILS", math.inf) if verdict is None else ("holds" if verdict.holds else "FAILS", verdict.worst[1])


def main(arguments: list[str] | None = None) -> int:
    """Print a line per case and what fails; the exit status is 1 if anything does, 2 if nothing is asked for."""
    parser = table_parser(__doc__)
    parser.add_argument("--cover", action="store_true", help="what the tests run instead of the whole table")
    cases = chosen(parser, arguments, lambda options: cover() if options.cover else whole_table())
    found = [report(case) for case in cases]
    states = [state for state, _ in found]
    print(f"{tally(states)}; the worst error is {max(error for _, error in found):.1e}")
    return int("FAILS" in states)


if __name__ == "__main__":
    raise SystemExit(main())

"""The law of meshes as a table: training on every factorisation of 8 devices is training on one device.

Run `python -m tools.mesh_law` for every factorisation with every set of features, `--part 1/4` for a quarter of it,
`--cover` for the pairwise cover that the tests run. Compared in float32, leaf by leaf: loss, metrics, gradients and
weights of three optimizer steps, on rows with odd documents, padding, unequal masks and slices that score nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec
from dew.objectives.language import LanguageModel
from dew.placement import Layout, LayoutRefused, MeshSpec, build_mesh
from dew.placement.rules import spec_axes
from dew.training.placing import plain
from dew.training.trainer import Trainer
from dew.tree import map_named, named_leaves

DEVICES = 8
ROWS, LENGTH, VOCAB = 8, 32, 64
STEPS = 3
RTOL = 1e-5
"""Largest difference, relative to the largest element of the leaf on one device."""
UNSCORED = slice(8, 16)
"""Positions without a scored token in any row: a whole slice of a sequence axis of 4, two of an axis of 8."""
PARAMETER_AXES = ("fsdp", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Features:
    """What a decoder and its rows have; each either is or is not.

    Attributes:
        packed: Documents of odd lengths share rows, some borders on borders of slices; rows and tails are padding.
        grouped: Two query heads share a key/value head.
        windowed: Layers read a window of 5 tokens: more than a slice of a sequence axis of 8, less than others.
        untied: The head has a matrix of its own.
        remat: Blocks are recomputed in the backward pass.
        scanned: Two layers are stored in a bank and run in a loop, instead of one on its own.
        dressed: Norms of queries and keys, biases, bounds of the logits, norms after the parts.
    """

    packed: bool
    grouped: bool
    windowed: bool
    untied: bool
    remat: bool
    scanned: bool
    dressed: bool

    def __str__(self) -> str:
        return " ".join(name for name, has in dataclasses.asdict(self).items() if has) or "plain"


class Factors(NamedTuple):
    """Sizes of the axes of a mesh of 8 devices."""

    data: int
    fsdp: int
    tensor: int
    sequence: int

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self._asdict().items() if size > 1)

    @property
    def spec(self) -> MeshSpec:
        """The spec whose data axis is what is left."""
        return MeshSpec(fsdp=self.fsdp, tensor=self.tensor, sequence=self.sequence)


class Case(NamedTuple):
    """One mesh with one set of features."""

    factors: Factors
    features: Features

    def __str__(self) -> str:
        return f"{self.factors} {self.features}"


def factorisations(devices: int = DEVICES) -> list[Factors]:
    """List every way to lay devices out on the four axes."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    return [Factors(*found) for found in itertools.product(sizes, repeat=4) if math.prod(found) == devices]


def feature_words() -> list[Features]:
    """List 16 sets of features in which any three of the seven occur together in every way.

    They are the words of the Hamming code [7, 4]: the opposite of each is another one. A word and its opposite follow
    each other.
    """
    words = []
    for a, b, c in itertools.product((False, True), repeat=3):
        word = (False, a, b, c, a ^ b, a ^ c, b ^ c)
        # Parity of three bits each; d is what the first bit adds to all.
        for flip in (a ^ b ^ c, not (a ^ b ^ c)):
            names = [field.name for field in dataclasses.fields(Features)]
            words.append(Features(**dict(zip(names, (bit ^ flip for bit in word), strict=True))))
    return words


def pairwise_cover() -> list[Case]:
    """List two cases a factorisation, so that any two of axis sizes, factorisations and features meet in one."""
    words = feature_words()
    cases = []
    for number, factors in enumerate(factorisations()):
        pair = 2 * (number % (len(words) // 2))
        cases += [Case(factors, words[pair]), Case(factors, words[pair + 1])]
    return cases


def whole_table() -> list[Case]:
    """List every factorisation with every set of features, cases of like features together."""
    return [Case(factors, features) for features in feature_words() for factors in factorisations()]


def kept_whole(case: Case) -> str | None:
    """Say why a case cannot split all its matrices, as the layout says it; None when it can.

    A tensor axis takes whole heads only.
    """
    if case.features.grouped and case.factors.tensor == 8:
        return "4 kv heads do not divide tensor=8"
    return None


def decoder(features: Features) -> CausalTransformer:
    """Build the decoder of a set of features: width 32, 8 query heads of 8, hidden width 64."""
    norm = NormSpec(eps=1e-5)

    def layer(window: int | None) -> LayerSpec:
        attention = AttentionSpec(
            num_heads=8,
            num_kv_heads=4 if features.grouped else 8,
            head_dim=8,
            rotary=RotarySpec(theta=10000.0),
            window=window,
            bias=features.dressed,
            out_bias=features.dressed,
            qk_norm=norm if features.dressed else None,
            softcap=20.0 if features.dressed else None,
        )
        mlp = MlpSpec(features=64, bias=features.dressed)
        return LayerSpec(mixer=attention, mlp=mlp, norm=norm, placement="both" if features.dressed else "pre")

    return CausalTransformer(
        VOCAB,
        32,
        (layer(5 if features.windowed else None),) * (2 if features.scanned else 1),
        norm,
        tie_embeddings=not features.untied,
        remat="full" if features.remat else None,
        scan_layers=features.scanned,
        max_length=LENGTH,
    )


# Ends of the documents of each row of 33 tokens; what follows the last end is padding. Slices end at multiples of 4.
_ENDS = ((7, 12, 15, 16, 33), (33,), (5, 8, 13, 24, 28, 33), (9, 24, 27), (1, 2, 3, 32), (5, 16, 21), (24, 25, 33), ())


def batch(features: Features, seed: int) -> dict[str, np.ndarray]:
    """Draw rows with a mask that scores a different number of tokens in each, none in the last."""
    generator = np.random.default_rng(seed)
    shape = (ROWS, LENGTH + 1)
    tokens = generator.integers(1, VOCAB, shape).astype(np.int32)
    mask = generator.random(shape) < np.linspace(0.3, 1.0, ROWS)[:, None]
    mask[-1] = False
    mask[:, UNSCORED.start + 1 : UNSCORED.stop + 1] = False
    if not features.packed:
        return {"tokens": tokens, "loss_mask": mask}
    segments = np.zeros(shape, np.int32)
    for row, ends in enumerate(_ENDS):
        for number, (start, end) in enumerate(itertools.pairwise((0, *ends))):
            segments[row, start:end] = number + 1
    return {"tokens": tokens, "loss_mask": mask, "segment_ids": segments}


class RecordedGradient(NamedTuple):
    """The gradient of the last step."""

    gradient: Any


def record_gradient() -> optax.GradientTransformation:
    """Keep each gradient in the optimizer's state, so that one program gives gradients and updates."""
    return optax.GradientTransformation(
        lambda params: RecordedGradient(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, RecordedGradient(updates)),
    )


def trainer_of(features: Features, factors: Factors | None, tolerance: float = 0.0) -> Trainer:
    """Build the trainer of a case; without factors that of one device."""
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if factors is None else build_mesh(factors.spec)
    # A large eps: Adam divides by the gradient's own size, which would magnify rounding where that is near 0.
    optimizer = optax.chain(record_gradient(), optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-2))
    layout = Layout(min_shard=1, tolerance=tolerance)
    return Trainer(LanguageModel(decoder(features)), optimizer, mesh=mesh, layout=layout)


@functools.cache
def initial_values(features: Features) -> Any:
    """Draw weights on the host: normal matrices, scales and biases around one and zero."""
    shapes = plain(trainer_of(features, None).abstract_variables())
    generator = np.random.default_rng(0)

    def draw(path: str, leaf: Any) -> np.ndarray:
        values = generator.normal(0, 0.15, leaf.shape).astype(np.float32)
        return values + 1 if path.endswith("scale") else values

    return map_named(draw, shapes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What three steps gave, by name.

    Attributes:
        numbers: Totals and masses of loss and metrics, gradients of each step, the weights at the end.
        state: The state at the end, placed.
        placed: One batch, placed.
    """

    numbers: dict[str, np.ndarray]
    state: Any
    placed: Any


def trained(trainer: Trainer, features: Features) -> Trained:
    """Train three steps."""
    loop = trainer.loop(trainer.place(initial_values(features)))
    numbers: dict[str, np.ndarray] = {}
    for number in range(STEPS):
        (result,) = loop.run([batch(features, number)])
        for name, ratio in result.read().items():
            numbers[f"step {number} {name}"] = np.asarray(ratio.total)
            numbers[f"step {number} {name} mass"] = np.asarray(ratio.mass)
        gradient = next(part for part in loop.state.opt_state if isinstance(part, RecordedGradient)).gradient
        numbers |= {f"step {number} gradient of {path}": leaf for path, leaf in _on_host(gradient).items()}
    numbers |= {f"weights {path}": leaf for path, leaf in _on_host(loop.state.params).items()}
    return Trained(numbers=numbers, state=loop.state, placed=trainer.place_batch(batch(features, 0)))


def _on_host(tree: Any) -> dict[str, np.ndarray]:
    return named_leaves(jax.device_get(tree))


@functools.cache
def one_device(features: Features) -> dict[str, np.ndarray]:
    """Give the numbers of one device."""
    return trained(trainer_of(features, None), features).numbers


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
        return self.worst[1] <= RTOL and (not self.unsplit or kept_whole(self.case) is not None)


def judge(case: Case) -> Verdict:
    """Train a case and compare it with one device.

    Raises:
        LayoutRefused: If the layout leaves a matrix whole that `kept_whole` does not name.
        AssertionError: If a leaf is zero on one device, so that nothing could be seen to differ.
    """
    start = time.perf_counter()
    want = one_device(case.features)
    tolerance = 1.0 if kept_whole(case) else 0.0
    got = trained(trainer_of(case.features, case.factors, tolerance), case.features)
    assert got.numbers.keys() == want.keys(), "the same numbers"
    errors = {}
    for name, values in want.items():
        # A count may be 0 on few tokens; what it is out of is not.
        scale = np.max(np.abs(want[f"{name} mass"] if "accuracy" in name and "mass" not in name else values))
        assert scale > 0, f"{name} is zero on one device"
        errors[name] = float(np.max(np.abs(got.numbers[name] - values)) / scale)
        if not np.all(np.isfinite(got.numbers[name])):
            errors[name] = math.inf
    return Verdict(case=case, errors=errors, unsplit=list(_unsplit(case, got)), seconds=time.perf_counter() - start)


def _unsplit(case: Case, got: Trained) -> Iterator[str]:
    """Name what is not split over all axes that should split it."""
    sizes = case.factors._asdict()
    wanted = {axis for axis in PARAMETER_AXES if sizes[axis] > 1}
    for path, leaf in named_leaves({"params": got.state.params, "optimizer": got.state.opt_state}).items():
        if path.endswith(("kernel", "embedding")) and set(spec_axes(leaf.sharding.spec)) != wanted:
            yield f"{path} {leaf.shape} over {spec_axes(leaf.sharding.spec)}, not {sorted(wanted)}"
    part = (ROWS // (sizes["data"] * sizes["fsdp"]), LENGTH // sizes["sequence"])
    for name, array in got.placed.items():
        if (shape := array.sharding.shard_shape(array.shape)) != part:
            yield f"batch {name} in parts of {shape}, not {part}"


def refusal(case: Case) -> str:
    """Give the text with which the layout refuses a case of `kept_whole`, or the empty string."""
    try:
        trainer_of(case.features, case.factors).shardings()
    except LayoutRefused as error:
        return str(error)
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Print a line per case and what fails; the exit status is 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cover", action="store_true", help="the pairwise cover instead of the whole table")
    parser.add_argument("--part", default="1/1", help="which part of how many, as in 2/4")
    parser.add_argument("--mesh", help="one factorisation only, as in fsdp=4,sequence=2")
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")
    part, parts = (int(number) for number in options.part.split("/"))
    cases = pairwise_cover() if options.cover else whole_table()
    cases = cases[len(cases) * (part - 1) // parts : len(cases) * part // parts]
    failed = 0
    for case in cases:
        if options.mesh not in (None, str(case.factors)):
            continue
        verdict = judge(case)
        name, error = verdict.worst
        failed += not verdict.holds
        state = "holds" if verdict.holds else "FAILS"
        print(f"{state} {case!s:70} {error:.1e} {name} ({verdict.seconds:.1f} s)", flush=True)
        if verdict.unsplit:
            print("      whole: " + "; ".join(verdict.unsplit), flush=True)
    print(f"{len(cases)} cases, {failed} fail")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())

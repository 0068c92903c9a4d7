"""The table of the law of meshes: every way to lay 8 devices out on six axes, crossed with what decoders and rows have.

Entry points: `whole_table`, `cover` (https://en.wikipedia.org/wiki/All-pairs_testing), `refused`, `kept_whole`. Plain
data: nothing here builds a model or touches a device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dew.placement import AXES, MeshSpec

DEVICES = 8
EXCHANGES = ("all_to_all", "gather", "ring", "banded")
SCHEDULES = ("gpipe", "1f1b")
TURNS = (1, 2)
"""Microbatches for each stage."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Features:
    """What a decoder and its rows have; each either is or is not.

    Attributes:
        packed: Documents of odd lengths share rows, some borders on borders of slices; rows and tails are padding.
        grouped: Two query heads share a key/value head.
        windowed: Layers read a window of 5 tokens: more than a slice of a sequence axis of 8, less than others.
        untied: The head has a matrix of its own.
        remat: Blocks are recomputed in the backward pass.
        scanned: Layers are stored in a bank and run in a loop, instead of one on its own.
        dressed: Norms of queries and keys, biases, bounds of the logits, norms after the parts, dropout; experts have a
            shared one with a gate, and a capacity that drops tokens.
        accumulated: Two batches make an update.
        sparse: Experts in place of perceptrons, with losses of their routers.
        predicting: Two layers predict the tokens after the next one; dressed ones share their norms and projection.
    """

    packed: bool
    grouped: bool
    windowed: bool
    untied: bool
    remat: bool
    scanned: bool
    dressed: bool
    accumulated: bool
    sparse: bool
    predicting: bool

    def __str__(self) -> str:
        return " ".join(name for name, has in dataclasses.asdict(self).items() if has) or "plain"


class Factors(NamedTuple):
    """Sizes of the axes of a mesh of 8 devices, in the order of `AXES`."""

    data: int = 1
    expert: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    stage: int = 1

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self._asdict().items() if size > 1)

    @property
    def row_shards(self) -> int:
        """Parts of a batch's rows."""
        return self.data * self.expert * self.fsdp


class Way(NamedTuple):
    """How a mesh is used where there is a choice.

    Attributes:
        exchange: How attention reads across slices of positions; None where they are not split.
        schedule: Order of a pipeline's microbatches; None where there are no stages.
        turns: Microbatches for each stage; None likewise.
    """

    exchange: str | None = None
    schedule: str | None = None
    turns: int | None = None

    def __str__(self) -> str:
        turns = () if self.turns is None else (f"{self.turns}x",)
        return " ".join(filter(None, (self.exchange, self.schedule, *turns)))


class Case(NamedTuple):
    """One mesh, used in one way, with one set of features."""

    factors: Factors
    way: Way
    features: Features

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.factors), str(self.way), str(self.features))))

    @property
    def spec(self) -> MeshSpec:
        """The spec whose data axis is what is left."""
        axes = {name: size for name, size in self.factors._asdict().items() if name != "data"}
        return MeshSpec(**axes, microbatches=self.factors.stage * self.way.turns if self.way.turns else None)

    @property
    def layers(self) -> int:
        """Layers of the decoder: a bank has four, so that stages share its reference, or one for each of eight."""
        return max(4, self.factors.stage) if self.features.scanned or self.factors.stage > 1 else 1

    @property
    def price(self) -> float:
        """What it counts for in the cover: between the one case that it is and the time that it takes to compile."""
        dearer = {"sparse": 1.7, "accumulated": 1.4, "remat": 1.1, "predicting": 2.0}
        by_schedule = {None: 1.0, "gpipe": 1.4, "1f1b": 1.7}[self.way.schedule]
        by_exchange = 1.3 if self.way.exchange == "ring" else 1.0
        return by_schedule * by_exchange * math.prod(dearer[name] for name in dearer if getattr(self.features, name))


def factorisations(devices: int = DEVICES) -> list[Factors]:
    """List every way to lay devices out on the six axes."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    return [Factors(*found) for found in itertools.product(sizes, repeat=len(AXES)) if math.prod(found) == devices]


def is_uniform(factors: Factors) -> bool:
    """Say whether all devices hold parts of every layer: neither stages nor an axis of experts."""
    return factors.stage == factors.expert == 1


@functools.cache
def feature_words() -> tuple[Features, ...]:
    """List 16 sets of features in which any two of the ten, and any three of the first eight, occur in every way.

    The first eight are the words of the Reed-Muller code RM(1, 3), the affine functions of three bits at all points;
    the last two are no affine functions, and their sum is none. The opposite of each set is another one. A set and its
    opposite follow each other.
    """
    names = [field.name for field in dataclasses.fields(Features)]
    words = []
    for a, b, c in itertools.product((False, True), repeat=3):
        word = (False, a, b, c, a ^ b, a ^ c, b ^ c, a ^ b ^ c, a + b + c < 2, a & b)
        words += [Features(**{n: bit ^ flip for n, bit in zip(names, word, strict=True)}) for flip in (False, True)]
    return tuple(words)


def ways(factors: Factors) -> list[Way]:
    """List how a mesh can be used."""
    exchanges = EXCHANGES if factors.sequence > 1 else (None,)
    if factors.stage == 1:
        return [Way(exchange) for exchange in exchanges]
    return [Way(*way) for way in itertools.product(exchanges, SCHEDULES, TURNS)]


def refused(case: Case) -> str | None:
    """Say why a case is refused, as its refusal says it; None for one that runs."""
    if case.factors.stage > 1 and not case.features.scanned:
        return "scan_layers=False stores each layer on its own"
    if case.way.exchange == "banded" and not case.features.windowed:
        return "it needs a window or chunks"
    return None


def kept_whole(case: Case) -> str | None:
    """Say why a case that runs cannot split all its matrices, as the layout says it; None when it can."""
    factors, features = case.factors, case.features
    # Of a layer, an axis of experts splits the experts alone, and stages split no layer behind the last norm; the
    # projection of a gate has one column.
    leaves_rest = factors.tensor == 1 and (factors.expert > 1 or (features.predicting and factors.stage > 1))
    leaves_gate = features.sparse and features.dressed and factors.expert * factors.tensor > 1
    if factors.fsdp == 1 and (leaves_rest or leaves_gate):
        return "no rule puts 'embed' on an axis larger than 1"
    if features.grouped and factors.tensor == 8:
        return "4 kv heads do not divide tensor=8"
    return None


def used(factors: Factors, way: Way, features: Features) -> Case:
    """Build a case; layers that predict further tokens are left out where a schedule scores before they could."""
    return Case(factors, way, dataclasses.replace(features, predicting=features.predicting and way.schedule != "1f1b"))


def every_case(meshes: Iterable[Factors], words: Iterable[Features]) -> list[Case]:
    """List meshes with every way to use them and sets of features, refused ones included."""
    return [used(mesh, way, word) for mesh, word in itertools.product(meshes, words) for way in ways(mesh)]


def whole_table() -> list[Case]:
    """List every factorisation with every set of features, refused ones included, cases of like features together.

    On the four uniform axes each is used in every way. With stages or an axis of experts each set of features is used
    in one way a mesh, another one on the next.
    """
    meshes = factorisations()
    cases = every_case(filter(is_uniform, meshes), feature_words())
    others = [factors for factors in meshes if not is_uniform(factors)]
    for (place, word), (number, factors) in itertools.product(enumerate(feature_words()), enumerate(others)):
        open_ways = [way for way in ways(factors) if refused(used(factors, way, word)) is None] or ways(factors)
        cases.append(used(factors, open_ways[(place // 2 + number) % len(open_ways)], word))
    return sorted(cases, key=_with_like)


def pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    """List any two things that a case has and that should meet in some case.

    They are numbers of stages or of shards of experts beside each other axis that is split, and exchanges beside the
    number of slices; any two of which axes are split, how the mesh is used, what the features are and are not; and
    split experts, dressed and plain, under each schedule and none beside each other axis. An axis of experts in a
    decoder without any splits rows as data does: that it runs is all there is to meet.
    """
    sizes, words = case.factors._asdict(), dataclasses.asdict(case.features)
    if case.factors.expert > 1 and not case.features.sparse:
        return {(("splits expert", True), ("sparse", False))}
    splits = [(f"splits {name}", size > 1) for name, size in sizes.items()]
    used = [(name, value) for name, value in case.way._asdict().items() if value is not None]
    counts = [("expert", case.factors.expert), ("stage", case.factors.stage)]
    kinds = [*splits, *used, *words.items()]
    slices = [(("exchange", case.way.exchange), ("sequence", case.factors.sequence))]
    return {
        *itertools.combinations([*counts, *splits], 2),
        *itertools.combinations(kinds, 2),
        *slices,
        *split_experts(case),
    }


def split_experts(case: Case) -> list[tuple[tuple[str, Any], ...]]:
    """List each axis that is split beside experts, with the schedule and whether the experts are dressed."""
    if case.factors.expert == 1 or not case.features.sparse:
        return []
    way, beside = (("schedule", case.way.schedule), ("dressed", case.features.dressed)), case.factors._asdict()
    return [(*way, ("beside", axis)) for axis, size in beside.items() if size > 1 and axis not in ("expert", "stage")]


@functools.cache
def cover() -> tuple[Case, ...]:
    """List few cases that run in which all `pairs` meet that can.

    Every uniform factorisation has one set of features; meshes with stages or an axis of experts add what those leave
    open, the case that adds most first. Cases of like features stand together.
    """
    words, meshes = feature_words(), factorisations()
    # Experts, windows of two batches, recomputation and layers that predict are most of what compiles: a mesh has them
    # here where they are what is to meet, and in the whole table.
    once = [dataclasses.replace(word, accumulated=False) for word in words]
    light = dict.fromkeys(dataclasses.replace(word, sparse=False) for word in once)
    light |= dict.fromkeys(dataclasses.replace(word, predicting=False) for word in light)
    either = dict.fromkeys([*words, *once, *(dataclasses.replace(word, remat=False) for word in once)])
    either |= dict.fromkeys(dataclasses.replace(word, sparse=False) for word in either)
    chosen = _Chosen()
    for factors in filter(is_uniform, meshes):
        chosen.take(chosen.masks(every_case([factors], light)))
    rest = chosen.masks(every_case(itertools.filterfalse(is_uniform, meshes), either))
    while any(mask & ~chosen.met for mask in rest.values()):
        chosen.take(rest)
    return tuple(sorted(chosen.cases, key=_with_like))


def _with_like(case: Case) -> tuple[Features, int]:
    """Sort cases so that those of one reference on one device stand together."""
    return case.features, case.layers


class _Chosen:
    """The cases of a cover that grows; sets of pairs are bits of a number.

    Attributes:
        cases: The cases.
        met: The pairs that meet in one of them.
    """

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.met = 0
        self._bits: dict[Any, int] = {}
        self._uses: collections.Counter[Any] = collections.Counter()

    def masks(self, cases: Iterable[Case]) -> dict[Case, int]:
        """Give the pairs of each case that runs."""
        runs = [case for case in cases if refused(case) is None]
        return {case: sum(1 << self._bits.setdefault(pair, len(self._bits)) for pair in pairs(case)) for case in runs}

    def take(self, masks: Mapping[Case, int]) -> None:
        """Add the case in which most new pairs meet for its price, which a new reference adds to."""

        def gain(case: Case) -> tuple[float, int]:
            uses = self._uses[case.features, case.layers]
            return (masks[case] & ~self.met).bit_count() / (case.price + (0.0 if uses else 0.6)), -uses

        best = max(masks, key=gain)
        self.cases.append(best)
        self.met |= masks[best]
        self._uses[best.features, best.layers] += 1


def parse_factors(text: str) -> Factors:
    """Read a factorisation, its axes in any order and those of size 1 left out, as in `sequence=2,fsdp=4`.

    Args:
        text: Axes and sizes.

    Raises:
        ValueError: If an axis is unknown or named twice, a size is no number, or the sizes are not those of 8 devices.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES or name in sizes or not size.isdecimal():
            raise ValueError(
                f"a mesh is written as axes and sizes, each axis once, as in fsdp=4,sequence=2; the axes are "
                f"{', '.join(AXES)}. Received: {part!r} in {text!r}"
            )
        sizes[name] = int(size)
    factors = Factors(**sizes)
    if factors not in factorisations():
        raise ValueError(f"{text!r} lays {math.prod(factors)} devices out, and the law is about {DEVICES}.")
    return factors

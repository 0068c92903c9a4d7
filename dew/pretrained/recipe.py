"""How a model leaf and the tensors of a checkpoint correspond: one statement, read by both load and export.

A family lists `Weight` rules; `recipes` matches them with the leaves of a model. The arrangement is written as
`"(N H) D -> D N H"`: dimensions of the stored tensor, then of the leaf, in the legend of `dew/arrays.py`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from dew.placement.stacks import StackView
from dew.pretrained.source import CheckpointError, TensorSource
from dew.tree import closest, matches

ONE = "1"
"""A dimension of a tensor that has one element and that the leaf lacks."""
MAX_EXPERTS, MAX_EXPERTS_OF_MODEL = 4096, 2**17
"""More experts than any layer and any model has; each has names of its own before any tensor is looked at."""


@dataclasses.dataclass(frozen=True)
class Fused:
    """Several leaves stored one after the other in one tensor.

    Attributes:
        dimension: The dimension of this leaf along which they follow each other; where they take turns, `1`, as the
            innermost of a group.
        parts: Paths of all of them in their order, as in `Weight.path`.
    """

    dimension: str
    parts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """Rule of a family: which stored tensor a per-layer leaf is.

    Attributes:
        path: Logical path of the leaf; `{i}` stands for a layer number.
        tensor: Hugging Face name of the tensor, with the same `{i}`. Where it has an `{e}`, the number of an expert,
            the leaf is a bank: its first dimension counts experts, each a tensor of its own.
        arrangement: Dimensions of the tensor, `->`, dimensions of the leaf; brackets hold dimensions stored as one, and
            `1` is a dimension of that size which the leaf lacks.
        fused: Where the leaf lies in a tensor that holds several; None where it is the whole tensor.
    """

    path: str
    tensor: str
    arrangement: str
    fused: Fused | None = None

    @property
    def is_of_experts(self) -> bool:
        """Whether each expert of the leaf is a tensor of its own."""
        return "{e}" in self.tensor

    def match(self, path: str) -> str | None:
        """Name of the tensor that a logical path is loaded from, or None when the rule is not about this path."""
        number = self.number(path)
        return None if number is None else self.tensor.replace("{i}", number)

    def number(self, path: str) -> str | None:
        """Layer number in a logical path, empty where the rule has none; None when the rule is not about this path."""
        found = re.fullmatch(re.escape(self.path).replace(r"\{i\}", r"(?P<i>\d+)"), path)
        return None if found is None else found.groupdict().get("i", "")


def fused_weights(tensor: str, *parts: tuple[str, str, str]) -> tuple[Weight, ...]:
    """State the leaves of one tensor.

    Args:
        tensor: Name of the tensor, as in `Weight`.
        *parts: Path, arrangement and fused dimension of each leaf, in the tensor's order.
    """
    paths = tuple(path for path, _, _ in parts)
    return tuple(Weight(path, tensor, arrangement, Fused(dimension, paths)) for path, arrangement, dimension in parts)


@dataclasses.dataclass(frozen=True)
class Cut:
    """Which part of a fused tensor a leaf is.

    Attributes:
        factor: Place of the fused dimension among the tensor's factors.
        start: Where the leaf begins in it; in rows of the tensor where the dimension is the outermost of its group,
            whose other factors may then differ between the parts.
        total: Size of all parts together, likewise.
    """

    factor: int
    start: int
    total: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Where one stored leaf of the model comes from.

    Attributes:
        path: Physical path of the leaf.
        shape: Shape of the leaf; a bank has the layers first.
        sources: Tensor of each layer of a bank, or the one tensor of another leaf; where experts have tensors of their
            own, those of each layer.
        banked: Whether the leaf has a leading dimension of layers.
        arrangement: As in `Weight`.
        cut: Which part of its tensors the leaf is; None means all of each.
        of_experts: Whether the leaf has a dimension of experts, behind that of layers, with a tensor for each.
    """

    path: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    banked: bool
    arrangement: str
    cut: Cut | None = None
    of_experts: bool = False

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of the part of the leaf that one tensor holds: without the dimensions of layers and experts."""
        return self.shape[len(self._stacked) :]

    def place_of(self, source: int) -> tuple[int, ...]:
        """Say where in the leaf a source lies: the numbers of its layer and expert, as far as the leaf has them."""
        return tuple(int(number) for number in np.unravel_index(source, self._stacked)) if self._stacked else ()

    @property
    def _stacked(self) -> tuple[int, ...]:
        return self.shape[: self.banked + self.of_experts]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each source tensor."""
        shape = [math.prod(sizes) for sizes in self.factors]
        if self.cut_rows is not None:
            assert self.cut is not None, "rows are cut"
            shape[self.cut_rows] = self.cut.total
        return tuple(shape)

    @property
    def cut_rows(self) -> int | None:
        """Which dimension of the tensor the leaf takes whole rows of; None where it takes all, or parts of rows."""
        outermost = [sum(len(sizes) for sizes in self._groups[:dim]) for dim in range(len(self._groups))]
        return None if self.cut is None or self.cut.factor not in outermost else outermost.index(self.cut.factor)

    @property
    def _groups(self) -> tuple[tuple[str, ...], ...]:
        return parse(self.arrangement)[0]

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Sizes that each dimension of the tensor consists of, outermost first; the leaf's own where rows are cut."""
        order = parse(self.arrangement)[1]
        sizes = {ONE: 1, **dict(zip(order, self.layer_shape, strict=True))}
        if self.cut is not None and self.cut_rows is None:
            sizes[[name for group in self._groups for name in group][self.cut.factor]] = self.cut.total
        return tuple(tuple(sizes[name] for name in group) for group in self._groups)

    @property
    def order(self) -> tuple[int, ...]:
        """For each dimension of the leaf, its place among the tensor's factors."""
        groups, order = parse(self.arrangement)
        flat = [name for group in groups for name in group]
        return tuple(flat.index(name) for name in order)

    def in_tensor_order(self, part: np.ndarray) -> np.ndarray:
        """View a part of one layer's leaf with the tensor's factors as dimensions."""
        return np.expand_dims(part.transpose(np.argsort(self.order)), self._ones)

    def in_leaf_order(self, stored: np.ndarray) -> np.ndarray:
        """View a part of a tensor, with its factors as dimensions, with the leaf's dimensions."""
        return stored.squeeze(self._ones).transpose(np.argsort(np.argsort(self.order)))

    @property
    def _ones(self) -> tuple[int, ...]:
        """Which of the tensor's factors the leaf lacks."""
        return tuple(
            place for place, name in enumerate(name for group in self._groups for name in group) if name == ONE
        )

    def part_of(self, tensor: np.ndarray) -> np.ndarray:
        """View the leaf's part of a tensor with the tensor's factors as dimensions."""
        factors = [size for sizes in self.factors for size in sizes]
        if self.cut is None:
            return tensor.reshape(factors)
        if self.cut_rows is None:
            size = 1 if self.cut.factor in self._ones else self.layer_shape[self.order.index(self.cut.factor)]
            own = slice(self.cut.start, self.cut.start + size)
            return tensor.reshape(factors)[(slice(None),) * self.cut.factor + (own,)]
        rows = math.prod(self.factors[self.cut_rows])
        own = slice(self.cut.start, self.cut.start + rows)
        return tensor[(slice(None),) * self.cut_rows + (own,)].reshape(factors)

    def tensor_slices(self, index: Sequence[slice]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Say which part of the tensor holds a part of the layer's leaf.

        Args:
            index: One slice with start and stop per dimension of the layer's leaf.

        Returns:
            The smallest covering slice per dimension of the tensor, and per factor the slice to take of what was read
            once it is reshaped to `read_factors`. They differ only where an inner factor of several outer ones is cut
            (some columns of every head); `runs` splits such a part.
        """
        by_factor = {place: slice(0, 1) for place in self._ones} | dict(zip(self.order, index, strict=True))
        if self.cut is not None and self.cut_rows is None:
            part = by_factor[self.cut.factor]
            by_factor[self.cut.factor] = slice(self.cut.start + part.start, self.cut.start + part.stop)
        covering, inner, place = [], [], 0
        for dim, sizes in enumerate(self.factors):
            own = [by_factor[place + offset] for offset in range(len(sizes))]
            place += len(sizes)
            first = self.cut.start if self.cut is not None and dim == self.cut_rows else 0
            if len(sizes) > 1 and own[0].stop - own[0].start == 1:
                first += own[0].start * math.prod(sizes[1:])
                inner.append(slice(0, 1))
                own, sizes = own[1:], sizes[1:]
            rest = math.prod(sizes[1:])
            covering.append(slice(first + own[0].start * rest, first + own[0].stop * rest))
            inner += [slice(0, own[0].stop - own[0].start), *own[1:]]
        return tuple(covering), tuple(inner)

    def runs(self, index: tuple[slice, ...]) -> Iterator[tuple[slice, ...]]:
        """Split a part of the layer's leaf where it takes some rows of every head, so that no rows between are read.

        Columns are not split: a stored row of a quantised tensor is read by blocks.

        Args:
            index: As in `tensor_slices`.
        """
        if len(self.factors[0]) > 1 and 1 in self.order:
            outer, cut = index[self.order.index(0)], index[self.order.index(1)]
            if cut.stop - cut.start < self.factors[0][1]:
                at = self.order.index(0)
                for number in range(outer.start, outer.stop):
                    yield (*index[:at], slice(number, number + 1), *index[at + 1 :])
                return
        yield index

    def read_factors(self, covering: Sequence[slice]) -> tuple[int, ...]:
        """Shape to give a covering read so that its dimensions are factors."""
        shape: list[int] = []
        for sizes, cover in zip(self.factors, covering, strict=True):
            rows, rest = cover.stop - cover.start, math.prod(sizes[1:])
            if rows % rest:  # a part of one outermost row
                shape += [1, rows // math.prod(sizes[2:]), *sizes[2:]]
            else:
                shape += [rows // rest, *sizes[1:]]
        return tuple(shape)


@functools.cache
def parse(arrangement: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Split an arrangement into the groups of tensor dimensions and the dimensions of the leaf.

    Raises:
        ValueError: If the two sides do not hold the same dimensions.
    """
    left, _, right = arrangement.partition("->")
    groups = tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\w+", left))
    order = tuple((right or left.replace("(", " ").replace(")", " ")).split())
    named = [name for group in groups for name in group if name != ONE]
    if sorted(named) != sorted(order) or len(set(order)) != len(order):
        raise ValueError(f"an arrangement names each dimension once on either side. Received: {arrangement!r}")
    return groups, order


def recipes(weights: Sequence[Weight], shapes: Mapping[str, tuple[int, ...]], view: StackView) -> tuple[Recipe, ...]:
    """Give every leaf of a model its recipe.

    Args:
        weights: Rules of the family.
        shapes: Shape of each physical leaf.
        view: How the model stores its layers.

    Raises:
        ValueError: If a leaf has no rule, a tensor would be read by two leaves, or a part of a fused tensor is missing.
    """
    found: list[Recipe] = []
    reader: dict[tuple[str, int], str] = {}
    for path, shape in shapes.items():
        logical = view.logical_paths(path)
        matched = [(weight, name) for each in logical for weight in weights if (name := weight.match(each))]
        if len(matched) != len(logical) or len({weight.arrangement for weight, _ in matched}) != 1:
            raise ValueError(f"The leaf {path!r} of shape {shape} has no place in a checkpoint of this family.")
        weight, banked = matched[0][0], view.bank_of(path) is not None
        names = tuple(name for _, name in matched)
        if weight.is_of_experts:
            names = tuple(name.replace("{e}", str(expert)) for name in names for expert in range(shape[banked]))
        cut = None if weight.fused is None else _cut(weight, weights, logical[0], shapes, view)
        for name in names:
            place = (name, cut.start if cut else 0)
            if place in reader:
                raise ValueError(f"The leaves {reader[place]!r} and {path!r} would both be read from {name!r}.")
            reader[place] = path
        found.append(Recipe(path, tuple(shape), names, banked, weight.arrangement, cut, weight.is_of_experts))
    return tuple(found)


def _cut(
    weight: Weight, weights: Sequence[Weight], path: str, shapes: Mapping[str, tuple[int, ...]], view: StackView
) -> Cut:
    """Find where one leaf of a fused tensor lies, from the sizes of all of its parts."""
    assert weight.fused is not None, "only a fused weight is cut"
    number = weight.number(path)
    start = total = 0
    for part in weight.fused.parts:
        rule = next(each for each in weights if each.path == part and each.tensor == weight.tensor)
        physical, layer = view.physical(part.replace("{i}", number or ""))
        if physical not in shapes or rule.fused is None:
            raise ValueError(f"The tensor {weight.tensor!r} needs the leaf {part!r}, which the model lacks.")
        groups, order = parse(rule.arrangement)
        sizes = {ONE: 1, **dict(zip(order, shapes[physical][layer is not None :], strict=True))}
        if part == weight.path:
            start = total
        rows = next((group for group in groups if group[0] == rule.fused.dimension), (rule.fused.dimension,))
        total += math.prod(sizes[name] for name in rows)
    factors = [name for group in parse(weight.arrangement)[0] for name in group]
    return Cut(factors.index(weight.fused.dimension), start, total)


def check_coverage(
    recipes: Iterable[Recipe],
    source: TensorSource,
    ignorable: Sequence[str],
    where: object,
    *,
    optional: Sequence[str] = (),
    advice: str = "",
) -> None:
    """Check, before anything is read, that leaves and tensors match one to one.

    Args:
        recipes: One per leaf of the model.
        source: The checkpoint.
        ignorable: Globs of tensors that carry no weight.
        where: The checkpoint, for errors.
        optional: Globs of tensors that a load can do without.
        advice: How, for errors of these tensors alone.

    Raises:
        CheckpointError: Listing tensors that are missing, left over, or of another shape.
    """
    wanted = {name: recipe for recipe in recipes for name in recipe.sources}
    present = set(source.names())
    problems = []
    missing = [name for name in wanted if name not in present]
    extra = sorted(name for name in present if name not in wanted and not matches(name, ignorable))
    if missing:
        near = next((name for name in extra if name.endswith(missing[0])), None) or closest(missing[0], extra)
        problems.append(f"missing tensors: {_listed(missing)}" + (f" (is {near!r} the first of them?)" if near else ""))
    if extra:
        problems.append(f"tensors that no part of the model reads: {_listed(extra)}")
    misfits = {name: problem for name in wanted if name in present and (problem := _misfit(wanted[name], name, source))}
    if misfits:
        problems.append(_listed(list(misfits.values())))
    if problems:
        can_do_without = all(matches(name, optional) for name in (*missing, *extra, *misfits))
        raise CheckpointError(
            f"{where} does not fit its config; nothing was loaded. "
            + "; ".join(problems)
            + (f". {advice}" if can_do_without else ".")
        )


def _misfit(recipe: Recipe, name: str, source: TensorSource) -> str | None:
    shape, dtype = source.info(name)
    if shape != recipe.tensor_shape:
        return f"{name} has shape {shape}, the config asks for {recipe.tensor_shape}"
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        return f"{name} is stored as {dtype.name}, a quantised form that is not read"
    return None


def _listed(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

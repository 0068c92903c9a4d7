"""A recipe says the same for load and export, and coverage is checked before anything is read."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.placement.stacks import Bank, StackView
from dew.pretrained.recipe import Cut, Recipe, Weight, check_coverage, fused_weights, parse, recipes
from dew.pretrained.source import CheckpointError, TensorInfo

ARRANGEMENTS = {
    "V D -> V D": (5, 4),
    "F D -> D F": (4, 6),
    "(N H) D -> D N H": (4, 3, 6),
    "D (N H) -> N H D": (3, 6, 4),
    "(N H) -> N H": (3, 6),
    "D -> D": (7,),
    "(K N H) D -> D K N H": (4, 2, 3, 6),
    "(N H) 1 W -> N H W": (3, 2, 4),
}


def slow_read(recipe, tensor, index):
    """Element by element: the leaf's element (i, j, ..) is the tensor's element at the combined factors."""
    groups, order = parse(recipe.arrangement)
    sizes = {"1": 1, **dict(zip(order, recipe.layer_shape, strict=True))}
    out = np.empty([axis.stop - axis.start for axis in index])
    for place in itertools.product(*(range(axis.start, axis.stop) for axis in index)):
        at = {"1": 0, **dict(zip(order, place, strict=True))}
        row = []
        for group in groups:
            position = 0
            for name in group:
                position = position * sizes[name] + at[name]
            row.append(position)
        out[tuple(p - axis.start for p, axis in zip(place, index, strict=True))] = tensor[tuple(row)]
    return out


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(ARRANGEMENTS)), st.data())
def test_any_part_of_a_leaf_is_found_in_the_tensor(arrangement, data):
    shape = ARRANGEMENTS[arrangement]
    recipe = Recipe("leaf", shape, ("tensor",), False, arrangement)
    tensor = np.arange(np.prod(shape), dtype=np.float64).reshape(recipe.tensor_shape)
    bounds = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    index = tuple(slice(*pair) for pair in bounds)
    covering, inner = recipe.tensor_slices(index)
    got = recipe.in_leaf_order(tensor[covering].reshape(recipe.read_factors(covering))[inner])
    np.testing.assert_array_equal(got, slow_read(recipe, tensor, index))


QKV = fused_weights(
    "l.{i}.qkv",
    ("params/layers_{i}/q", "(N H) D -> D N H", "N"),
    ("params/layers_{i}/k", "(K H) D -> D K H", "K"),
    ("params/layers_{i}/v", "(K H) D -> D K H", "K"),
)
PER_HEAD = fused_weights(
    "l.{i}.qkv",
    ("params/layers_{i}/q", "(N H) D -> D N H", "H"),
    ("params/layers_{i}/k", "(N H) D -> D N H", "H"),
    ("params/layers_{i}/v", "(N H) D -> D N H", "H"),
)


@pytest.mark.parametrize("weights, kv", [(QKV, 2), (PER_HEAD, 4)], ids=["one after the other", "in every head"])
def test_fused_leaves_are_parts_of_one_tensor(weights, kv):
    D, N, H = 5, 4, 3
    rng = np.random.default_rng(0)
    shapes = {"params/layers_0_1/q": (2, D, N, H)} | {f"params/layers_0_1/{x}": (2, D, kv, H) for x in "kv"}
    leaves = {path: rng.normal(size=shape) for path, shape in shapes.items()}
    found = recipes(weights, shapes, VIEW)
    flat = [leaves[path][1].transpose(1, 2, 0) for path in shapes]  # heads, H, D
    fused = np.concatenate(flat, axis=0 if weights is QKV else 1).reshape(-1, D)
    for recipe in found:
        assert recipe.tensor_shape == fused.shape
        assert recipe.sources == ("l.0.qkv", "l.1.qkv")
        for index in ((slice(0, D), slice(0, recipe.shape[2]), slice(0, H)), (slice(1, 3), slice(1, 2), slice(1, 3))):
            covering, inner = recipe.tensor_slices(index)
            got = recipe.in_leaf_order(fused[covering].reshape(recipe.read_factors(covering))[inner])
            np.testing.assert_array_equal(got, leaves[recipe.path][1][index])
    assert found[1].cut == (Cut(0, 12, 24) if weights is QKV else Cut(1, 3, 9))


TAPS = fused_weights(
    "l.{i}.conv",
    ("params/layers_{i}/x", "(N H) 1 W -> N H W", "N"),
    ("params/layers_{i}/b", "(G P) 1 W -> G P W", "G"),
    ("params/layers_{i}/dt", "N 1 W -> N W", "N"),
)


def test_parts_of_one_tensor_may_have_rows_of_their_own_shape():
    shapes = {
        "params/layers_0_1/x": (2, 4, 3, 2),
        "params/layers_0_1/b": (2, 2, 5, 2),
        "params/layers_0_1/dt": (2, 7, 2),
    }
    found = recipes(TAPS, shapes, VIEW)
    assert [(recipe.cut, recipe.tensor_shape) for recipe in found] == [
        (Cut(0, start, 29), (29, 1, 2)) for start in (0, 12, 22)
    ]
    tensor = np.arange(58.0).reshape(29, 1, 2)
    written = np.zeros_like(tensor)
    for recipe, rows in zip(found, (slice(0, 12), slice(12, 22), slice(22, 29)), strict=True):
        want = tensor[rows].reshape(recipe.layer_shape)
        for index in (tuple(slice(0, size) for size in want.shape), (slice(1, 2), *[slice(0, 2)] * (want.ndim - 1))):
            covering, inner = recipe.tensor_slices(index)
            got = recipe.in_leaf_order(tensor[covering].reshape(recipe.read_factors(covering))[inner])
            np.testing.assert_array_equal(got, want[index])
        recipe.in_leaf_order(recipe.part_of(written))[...] = want
    np.testing.assert_array_equal(written, tensor)


TURNS = fused_weights(
    "l.{i}.gate_up",
    ("params/layers_{i}/gate", "E D (F 1) -> E D F", "1"),
    ("params/layers_{i}/up", "E D (F 1) -> E D F", "1"),
)


def test_the_columns_of_two_leaves_may_take_turns():
    tensor = np.arange(3 * 4 * 10.0).reshape(3, 4, 10)
    written, shapes = np.zeros_like(tensor), {f"params/layers_0_1/{name}": (2, 3, 4, 5) for name in ("gate", "up")}
    for first, recipe in enumerate(recipes(TURNS, shapes, VIEW)):
        assert (recipe.tensor_shape, recipe.cut) == ((3, 4, 10), Cut(3, first, 2))
        want = tensor[..., first::2]
        for index in ((slice(0, 3), slice(0, 4), slice(0, 5)), (slice(1, 2), slice(1, 3), slice(2, 5))):
            covering, inner = recipe.tensor_slices(index)
            got = recipe.in_leaf_order(tensor[covering].reshape(recipe.read_factors(covering))[inner])
            np.testing.assert_array_equal(got, want[index])
        recipe.in_leaf_order(recipe.part_of(written))[...] = want
    np.testing.assert_array_equal(written, tensor)


def test_a_fused_tensor_needs_all_of_its_parts():
    with pytest.raises(ValueError, match=r"'l\.\{i\}\.qkv' needs the leaf 'params/layers_\{i\}/v'"):
        recipes(QKV, {"params/layers_0_1/q": (2, 5, 4, 3), "params/layers_0_1/k": (2, 5, 2, 3)}, VIEW)


@pytest.mark.parametrize("wrong", ["A B -> A", "A B -> A C", "A A -> A A", "(A B -> A B C", "A -> A A"])
def test_an_arrangement_names_each_dimension_once(wrong):
    with pytest.raises(ValueError, match="names each dimension once"):
        parse(wrong)


WEIGHTS = (Weight("params/layers_{i}/w", "l.{i}.w", "F D -> D F"), Weight("params/norm", "norm", "D -> D"))
VIEW = StackView((Bank("layers_0_1", ("layers_0", "layers_1")),))


def test_a_bank_reads_its_layers_in_order():
    found = recipes(WEIGHTS, {"params/layers_0_1/w": (2, 3, 4), "params/norm": (3,)}, VIEW)
    assert found[0].sources == ("l.0.w", "l.1.w")
    assert found[0].tensor_shape == (4, 3)
    assert found[1].sources == ("norm",)


def test_a_leaf_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"'params/layers_0_1/extra' of shape \(2, 3\) has no place"):
        recipes(WEIGHTS, {"params/layers_0_1/extra": (2, 3)}, VIEW)


def test_a_tensor_has_one_reader():
    weights = (*WEIGHTS, Weight("params/head", "norm", "D -> D"))
    with pytest.raises(ValueError, match="'params/norm' and 'params/head' would both be read from 'norm'"):
        recipes(weights, {"params/norm": (3,), "params/head": (3,)}, VIEW)


class Listed:
    """A source that has names and shapes and refuses to be read."""

    def __init__(self, **shapes):
        self.shapes = shapes

    def names(self):
        return self.shapes

    def info(self, name):
        return TensorInfo(self.shapes[name], np.dtype(np.float32))


FOUND = (Recipe("a", (3, 4), ("w.a",), False, "F D -> D F"), Recipe("b", (3,), ("w.b",), False, "D -> D"))


def test_coverage_lists_what_is_missing_left_over_and_misshapen():
    check_coverage(FOUND, Listed(**{"w.a": (4, 3), "w.b": (3,), "inv_freq": (2,)}), ("inv_*",), "there")
    with pytest.raises(
        CheckpointError, match=r"there does not fit its config; nothing was loaded\. missing tensors: w\.b"
    ):
        check_coverage(FOUND, Listed(**{"w.a": (4, 3)}), (), "there")
    with pytest.raises(CheckpointError, match=r"no part of the model reads: c, d"):
        check_coverage(FOUND, Listed(**{"w.a": (4, 3), "w.b": (3,), "d": (1,), "c": (1,)}), (), "there")
    with pytest.raises(CheckpointError, match=r"w\.a has shape \(3, 4\), the config asks for \(4, 3\)"):
        check_coverage(FOUND, Listed(**{"w.a": (3, 4), "w.b": (3,)}), (), "there")


def test_a_renamed_tensor_is_suggested():
    with pytest.raises(CheckpointError, match=r"is 'model\.w\.b' the first of them"):
        check_coverage(FOUND, Listed(**{"w.a": (4, 3), "model.w.b": (3,)}), (), "there")


def test_quantised_storage_without_its_scales_is_refused():
    source = Listed(**{"w.a": (4, 3), "w.b": (3,)})
    source.info = lambda name: TensorInfo(source.shapes[name], np.dtype(np.int8 if name == "w.a" else np.float32))
    with pytest.raises(CheckpointError, match=r"w\.a is stored as int8"):
        check_coverage(FOUND, source, (), "there")

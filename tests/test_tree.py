"""Path names: one name per leaf, built and undone without loss."""

import collections

import pytest

from dew.tree import closest, map_named, matches, named_leaves, nested


def test_names_follow_dicts_sequences_and_named_tuples():
    State = collections.namedtuple("State", ["mu", "count"])
    tree = {"params": {"layers_3": {"kernel": 1}}, "opt": (State(mu={"w": 2}, count=3), [4])}
    assert named_leaves(tree) == {
        "opt/0/mu/w": 2,
        "opt/0/count": 3,
        "opt/1/0": 4,
        "params/layers_3/kernel": 1,
    }


def test_nested_undoes_named_leaves():
    tree = {"b": {"y": 1, "x": {"z": 2}}, "a": 3}
    assert nested(named_leaves(tree)) == tree


@pytest.mark.parametrize(
    "leaves", [{"a": 1, "a/b": 2}, {"a/b": 1, "a": 2}, {"a": {}, "a/b": 2}, {"a": {"c": 1}, "a/b": 2}]
)
def test_a_path_that_is_leaf_and_parent_is_refused(leaves):
    with pytest.raises(ValueError, match="leaf"):
        nested(leaves)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"one path: \['a/b'\]"):
        named_leaves({"a/b": 1, "a": {"b": 2}})


def test_map_named_gives_path_and_every_leaf():
    tree, other = {"a": {"b": 1}, "c": 2}, {"a": {"b": 10}, "c": 20}
    assert map_named(lambda path, x, y: (path, x + y), tree, other) == {"a": {"b": ("a/b", 11)}, "c": ("c", 22)}


def test_globs_match_whole_paths_and_cross_slashes():
    assert matches("params/layers_3/mlp/up_proj/kernel", "params/layers_*")
    assert matches("params/layers_3/mlp/up_proj/kernel", ("nothing", "*/up_proj/*"))
    assert not matches("params/layers_3/mlp", "layers_*")


def test_closest_finds_the_typing_error_only():
    assert closest("tensr", ["data", "tensor"]) == "tensor"
    assert closest("zebra", ["data", "tensor"]) is None

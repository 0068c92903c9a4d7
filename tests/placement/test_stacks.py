"""Banks and layers: two names of the same numbers."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dew.placement.stacks import Bank, StackView, stack_view
from dew.tree import named_leaves

VIEW = StackView(
    (Bank("layers_0_2", ("layers_0", "layers_1", "layers_2")), Bank("layers_4_5", ("layers_4", "layers_5")))
)


def physical(array=np.arange):
    def leaf(*shape):
        return array(int(np.prod(shape)), dtype=np.float32).reshape(shape)

    return {
        "params": {
            "embed": {"table": leaf(4, 2)},
            "layers_0_2": {"mlp": {"kernel": leaf(3, 2, 5)}, "norm": {"scale": leaf(3, 2)}},
            "layers_3": {"mlp": {"kernel": leaf(2, 5)}},
            "layers_4_5": {"mlp": {"kernel": leaf(2, 2, 5)}},
        },
        "stats": {"layers_0_2": {"count": leaf(3)}},
    }


@pytest.mark.parametrize("array", [np.arange, jnp.arange], ids=["numpy", "jax"])
def test_stack_undoes_unstack(array):
    tree = physical(array)
    back = VIEW.stack(VIEW.unstack(tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_every_logical_leaf_is_the_slice_its_physical_path_says():
    tree = named_leaves(physical())
    logical = named_leaves(VIEW.unstack(physical()))
    assert set(logical) == {name for path in tree for name in VIEW.logical_paths(path)}
    for path, leaf in logical.items():
        stored, index = VIEW.physical(path)
        np.testing.assert_array_equal(leaf, tree[stored] if index is None else tree[stored][index])
        assert VIEW.logical_paths(stored)[index or 0] == path
    assert VIEW.physical("params/layers_4/mlp/kernel") == ("params/layers_4_5/mlp/kernel", 0)
    assert VIEW.physical("params/layers_3/mlp/kernel") == ("params/layers_3/mlp/kernel", None)


def test_layers_inside_tuples_and_named_tuples_are_found():
    State = collections.namedtuple("State", ["count", "mu"])
    tree = (State(count=np.zeros(()), mu=physical()["params"]), [physical()["params"]])
    got = VIEW.unstack(tree)
    assert isinstance(got[0], State)
    assert set(got[0].mu) == set(got[1][0]) == {"embed", *(f"layers_{index}" for index in range(6))}


def test_shapes_and_boxes_are_sliced_like_arrays():
    boxed = {"layers_4_5": {"w": nn.LogicallyPartitioned(jax.ShapeDtypeStruct((2, 3), "float32"), ("layers", "embed"))}}
    layer = VIEW.unstack(boxed)["layers_5"]["w"]
    assert layer.names == ("embed",)
    assert layer.value.shape == (3,)
    assert VIEW.stack(VIEW.unstack(boxed)) == boxed
    shapes = VIEW.logical_shapes(physical())
    assert shapes == {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in named_leaves(VIEW.unstack(physical())).items()
    }


def test_incomplete_and_uneven_banks_are_refused():
    tree = VIEW.unstack(physical())
    del tree["params"]["layers_1"]
    with pytest.raises(ValueError, match=r"Bank 'layers_0_2' needs all of its layers; the tree lacks \['layers_1'\]"):
        VIEW.stack(tree)
    tree = VIEW.unstack(physical())
    tree["params"]["layers_1"]["norm"]["scale"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="equal shapes and dtypes"):
        VIEW.stack(tree)
    with pytest.raises(ValueError, match="its first dimension must be its 3 layers"):
        VIEW.unstack({"layers_0_2": np.zeros((2, 4))})
    with pytest.raises(ValueError, match="distinct names"):
        StackView((Bank("a", ("x",)), Bank("b", ("x",))))


def test_a_module_without_banks_has_an_empty_view():
    assert stack_view(nn.Dense(3)) == StackView()
    assert stack_view(object()).unstack({"layers_0": 1}) == {"layers_0": 1}

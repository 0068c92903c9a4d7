"""Several outputs, nested at will: targets, weights, losses and metrics go by structure or by path, as in Keras."""

import flax.linen as nn
import jax
import keras
import numpy as np
import pytest

import dew_keras
from dew_keras.outputs import Output, align_targets, flatten_outputs, per_output
from tests.dew_keras.nets import rows, weights_of

HEADS = ("p", "q", "r")


class Nested(nn.Module):
    """Three heads in a structure of a kind."""

    kind: str = "dict"

    @nn.compact
    def __call__(self, x):
        """Apply them."""
        return structure(self.kind, *(nn.Dense(2, name=name)(x) for name in HEADS))


def structure(kind, p, q, r):
    return {
        "dict": {"trunk": {"p": p, "q": q}, "r": r},
        "mixed": {"trunk": (p, q), "r": [r]},
        "tuple": ((p, q), r),
        "list": [{"p": p, "q": q}, r],
        "flat": (p, q, r),
    }[kind]


# What the losses of Keras' functional model, whose layers are p, q and r, are called, and what ours are.
NAMES = {
    "dict": {"p": "trunk/p", "q": "trunk/q", "r": "r"},
    "mixed": {"p": "trunk/0", "q": "trunk/1", "r": "r/0"},
    "tuple": {"p": "0/0", "q": "0/1", "r": "1"},
    "list": {"p": "0/p", "q": "0/q", "r": "1"},
}


def both(kind, mesh=None, **settings):
    inputs = keras.Input((4,))
    layers = {name: keras.layers.Dense(2, name=name) for name in HEADS}
    theirs = keras.Model(inputs, structure(kind, *(layers[name](inputs) for name in HEADS)))
    params = {
        name: {"kernel": np.asarray(layer.kernel.value), "bias": np.asarray(layer.bias.value)}
        for name, layer in layers.items()
    }
    ours = dew_keras.Model(Nested(kind), variables={"params": params})
    for model, more in ((ours, {"mesh": mesh}), (theirs, {})):
        model.compile("sgd", **settings, **more)
    return ours, theirs


def numbers(logs):
    """Losses of heads and metrics of heads as sorted numbers, as their names differ where Keras knows layers."""
    last = {name: np.ravel(value)[-1] for name, value in logs.items()}
    return np.array([last.pop("loss"), *sorted(last.values())])


def arrays():
    x, y, weight = rows(10, classes=6)
    return x, (y[:, :2], y[:, 2:4] * 2, y[:, 4:] * 3), weight


@pytest.mark.parametrize("kind", NAMES)
def test_nested_outputs_train_as_in_keras(kind):
    x, y, weight = arrays()
    targets = structure(kind, *y)
    weights = structure(kind, weight, weight / 2, weight * 3)
    settings = {
        "loss": structure(kind, "mse", "mae", "huber"),
        "loss_weights": structure(kind, 1.0, 0.5, 2.0),
        "metrics": structure(kind, ["mae"], ["mse"], ["mae"]),
    }
    ours, theirs = both(kind, {"data": 8} if kind == "dict" else {"data": 4, "fsdp": 2}, **settings)
    got = ours.fit(x, targets, 4, 2, 0, shuffle=False, sample_weight=weights).history
    want = theirs.fit(x, targets, 4, 2, 0, shuffle=False, sample_weight=weights).history
    names = NAMES[kind]
    metrics = {"p": "mae", "q": "mse", "r": "mae"}
    assert set(got) == {"loss", *(f"{name}_loss" for name in names.values())} | {
        f"{names[head]}_{metric}" for head, metric in metrics.items()
    }
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    for head, metric in metrics.items():
        np.testing.assert_allclose(got[f"{names[head]}_{metric}"], want[f"{head}_{metric}"], rtol=1e-5)
    np.testing.assert_allclose(numbers(got), numbers(want), rtol=1e-5)
    found, expected = ours.predict(x, 4, 0), theirs.predict(x, 4, 0)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_names_order_and_values_of_an_evaluation_are_those_of_keras():
    x, y, _ = arrays()
    kind = "dict"
    settings = {"loss": structure(kind, "mse", "mae", "huber"), "metrics": structure(kind, ["mse", "mae"], None, "mae")}
    ours, theirs = both(kind, **settings)
    got, want = (m.evaluate(x, structure(kind, *y), 4, 0) for m in (ours, theirs))
    # Keras sorts metrics by the names of layers, p, q, r; ours by path, where r comes first.
    assert ours.metrics_names == [
        *("loss", "r_loss", "trunk/p_loss", "trunk/q_loss"),
        *("r_mae", "trunk/p_mae", "trunk/p_mse"),
    ]
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(sorted(got), sorted(want), rtol=1e-6)
    assert ours.evaluate(x, structure(kind, *y), 4, 0, return_dict=True) == pytest.approx(
        dict(zip(ours.metrics_names, got, strict=True))
    )


@pytest.mark.parametrize(
    "loss",
    [
        {"trunk/p": "mse", "trunk/q": "mse", "r": "mae"},
        {"trunk": "mse", "r": "mae"},
        {"trunk": {"p": "mse", "q": "mse"}, "r": "mae"},
        ["mae", "mse", "mse"],
    ],
    ids=["by path", "by branch", "by structure", "by position"],
)
def test_one_loss_may_be_said_in_several_ways(loss):
    outputs = [Output(path, None, (1, 2)) for path in flatten_outputs(structure("dict", 1, 2, 3))[0]]
    assert per_output(loss, outputs, "loss") == ["mae", "mse", "mse"]


def test_an_output_may_be_left_out():
    x, y, _ = arrays()
    model = dew_keras.Model(Nested("dict"))
    model.compile("sgd", {"trunk": {"q": "mae"}}, mesh={"data": 8})
    history = model.fit(x, {"trunk/q": y[1]}, 4, 1, 0).history
    assert list(history) == ["loss"]
    nothing = dew_keras.Model(Nested("dict"))
    nothing.compile("sgd", {"trunk": {"q": "mae"}, "r": "mse"})
    with pytest.raises(ValueError, match=r"The loss 'mse' needs targets"):
        nothing.fit(x, {"trunk/q": y[1]}, 4, 1, 0)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"trunk": {"x": "mse"}}, r"names outputs that the model does not have: 'x'"),
        ({"s": "mse"}, r"names outputs that the model does not have: 's'"),
        (["mse", "mae"], r"needs one entry per output, 3 of them"),
        ({"trunk": ["mse", "mse", "mse"]}, r"needs one entry per output, 2 of them"),
    ],
)
def test_what_fits_no_output_is_refused(given, message):
    outputs = [Output(path, None, (1, 2)) for path in flatten_outputs(structure("dict", 1, 2, 3))[0]]
    with pytest.raises(ValueError, match=message):
        per_output(given, outputs, "loss")


@pytest.mark.parametrize("y", [[1, 2], {"trunk": {"p": 1}, "x": 2}, {"p": 1, "q": 2, "r": 3}, ((1, 2), 3, 4), {}])
def test_targets_of_another_structure_are_refused(y):
    paths = flatten_outputs(structure("dict", 1, 2, 3))[0]
    with pytest.raises(ValueError, match=r"y must have the structure of the model's outputs"):
        align_targets(y, paths, "y")


def test_paths_that_read_alike_are_refused():
    with pytest.raises(ValueError, match=r"\['a/b'\] stands for several"):
        flatten_outputs({"a": {"b": 1}, "a/b": 2})


def test_several_metrics_of_one_tuple_of_outputs_have_keras_names():
    x, y, weight = arrays()
    settings = {"loss": "mse", "metrics": [["mae", "mse"], ["mae"], []], "weighted_metrics": [[], ["mae"], ["mse"]]}
    ours, theirs = both("flat", **settings)
    got = ours.evaluate(x, y, 4, 0, sample_weight=weight, return_dict=True)
    want = theirs.evaluate(x, y, 4, 0, sample_weight=weight, return_dict=True)
    np.testing.assert_allclose(numbers(got), numbers(want), rtol=1e-5)


def test_a_list_of_targets_goes_to_a_dict_of_outputs_in_keras_order():
    x, y, _ = rows(10)
    inputs = keras.Input((4,))
    theirs = keras.Model(inputs, {name: keras.layers.Dense(3, name=name)(inputs) for name in ("b", "a")})
    ours = dew_keras.Model(
        Pair(),
        variables={
            "params": {
                name: dict(zip(("kernel", "bias"), weights_of(theirs.get_layer(name)), strict=True))
                for name in ("a", "b")
            }
        },
    )
    found = []
    for model in (ours, theirs):
        model.compile("sgd", ["mse", "mae"], weighted_metrics=[["mae"], ["mse"]])
        found.append(model.fit(x, [y, -y], 4, 2, 0, shuffle=False).history)
        found[-1] |= model.evaluate(x, [y, -y], verbose=0, return_dict=True)
    assert list(found[0]) == list(found[1])
    for name, values in found[1].items():
        np.testing.assert_allclose(found[0][name], values, rtol=1e-5, err_msg=name)


class Pair(nn.Module):
    """Two heads in a flat dict, not in the order of their names."""

    @nn.compact
    def __call__(self, x):
        """Apply them."""
        return {"b": nn.Dense(3, name="b")(x), "a": nn.Dense(3, name="a")(x)}

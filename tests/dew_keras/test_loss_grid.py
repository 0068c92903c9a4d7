"""Every loss of Keras, reduction, weight and batch size beside a real keras.Model: one head of a model per loss."""

import flax.linen as nn
import jax
import keras
import numpy as np
import pytest

import dew_keras
from dew_keras.losses import LossSet
from dew_keras.outputs import Output
from tests.dew_keras.nets import Linear, StillFirst, assert_same_logs, kernel

ROWS, WIDTH, CLASSES = 10, 4, 3
REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")
K = keras.losses


class Soft(keras.losses.Loss):
    """A user's own loss class."""

    def call(self, y_true, y_pred):
        """Compare row by row."""
        return keras.ops.mean(keras.ops.sqrt(1.0 + keras.ops.square(y_true - y_pred)), axis=-1)


def absolute(y_true, y_pred):
    """A user's own function."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 1.5, axis=-1)


# For each head its loss, what its targets are and what is done to its scores.
HEADS = {
    "mse": (K.MeanSquaredError, "real", None),
    "mae": (K.MeanAbsoluteError, "real", None),
    "mape": (K.MeanAbsolutePercentageError, "one_hot_real", None),
    "msle": (K.MeanSquaredLogarithmicError, "positive", "softplus"),
    "huber": (lambda reduction: K.Huber(delta=0.5, reduction=reduction), "real", None),
    "log_cosh": (K.LogCosh, "real", None),
    "cosine": (K.CosineSimilarity, "real", None),
    "bce": (K.BinaryCrossentropy, "binary", "sigmoid"),
    "bce_logits": (
        lambda reduction: K.BinaryCrossentropy(from_logits=True, label_smoothing=0.1, reduction=reduction),
        "binary",
        None,
    ),
    "focal": (K.BinaryFocalCrossentropy, "binary", "sigmoid"),
    "cce": (K.CategoricalCrossentropy, "one_hot", "softmax"),
    "cce_logits": (
        lambda reduction: K.CategoricalCrossentropy(from_logits=True, reduction=reduction),
        "one_hot",
        None,
    ),
    "cfocal": (K.CategoricalFocalCrossentropy, "one_hot", "softmax"),
    "cgce": (K.CategoricalGeneralizedCrossEntropy, "sparse", "softmax"),
    "sparse": (K.SparseCategoricalCrossentropy, "sparse", "softmax"),
    "sparse_logits": (
        lambda reduction: K.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, reduction=reduction),
        "sparse",
        None,
    ),
    "column": (
        lambda reduction: K.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
        "column",
        None,
    ),
    "kld": (K.KLDivergence, "one_hot", "softmax"),
    "poisson": (K.Poisson, "positive", "softplus"),
    "hinge": (K.Hinge, "sign", None),
    "squared_hinge": (K.SquaredHinge, "binary", None),
    "categorical_hinge": (K.CategoricalHinge, "one_hot", None),
    "own": (lambda reduction: Soft(reduction=reduction), "real", None),
    "function": (lambda reduction: absolute, "real", None),
    "name": (lambda reduction: "huber", "real", None),
}


# What whole models are trained on; compiling a head costs time.
TRAINED = ("mse", "bce", "cce_logits", "sparse", "sparse_logits", "column", "poisson", "own", "function")


def targets():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, CLASSES, ROWS)
    binary = rng.integers(0, 2, (ROWS, CLASSES)).astype("float32")
    kinds = {
        "real": rng.normal(size=(ROWS, CLASSES)).astype("float32"),
        "positive": rng.uniform(0.1, 2, (ROWS, CLASSES)).astype("float32"),
        "binary": binary,
        "sign": 2 * binary - 1,
        "one_hot": np.eye(CLASSES, dtype="float32")[labels],
        "sparse": labels,
        "column": labels[:, None],
    }
    kinds["one_hot_real"] = kinds["one_hot"] + 0.5
    return {name: kinds[kind] for name, (_, kind, _) in HEADS.items()}


class Heads(nn.Module):
    """One dense layer per loss."""

    @nn.compact
    def __call__(self, x):
        """Apply them."""
        found = {}
        for name in TRAINED:
            scores, activation = nn.Dense(CLASSES, name=name)(x), HEADS[name][2]
            found[name] = scores if activation is None else getattr(nn, activation)(scores)
        return found


@pytest.fixture(scope="module")
def start():
    """The weights that every model starts from."""
    rng = np.random.default_rng(2)
    draw = lambda *shape: rng.normal(0, 0.5, shape).astype("float32")  # noqa: E731
    return {name: (draw(WIDTH, CLASSES), draw(CLASSES)) for name in TRAINED}


def build(start, mesh, settings):
    """Make both models with the same weights, compiled alike."""
    inputs = keras.Input((WIDTH,))
    layers = {name: keras.layers.Dense(CLASSES, name=name, activation=HEADS[name][2]) for name in TRAINED}
    theirs = keras.Model(inputs, {name: layer(inputs) for name, layer in layers.items()})
    for name, layer in layers.items():
        layer.set_weights(start[name])
    params = {name: {"kernel": weight, "bias": bias} for name, (weight, bias) in start.items()}
    ours = dew_keras.Model(Heads(), variables={"params": params})
    ours.compile(keras.optimizers.SGD(0.02), **settings(), mesh=mesh)
    theirs.compile(keras.optimizers.SGD(0.02), **settings())
    return ours, theirs


def settings_of(shift):
    """Give every head its loss, with the reductions dealt out in turn, and some of them metrics."""
    losses = {name: HEADS[name][0](reduction=REDUCTIONS[(i + shift) % 3]) for i, name in enumerate(TRAINED)}
    return {
        "loss": losses,
        "loss_weights": {name: 0.5 + i % 2 for i, name in enumerate(TRAINED)},
        "metrics": {"mse": ["mae", "mse"], "cce_logits": ["accuracy"], "sparse": ["accuracy"], "bce": ["AUC"]},
        "weighted_metrics": {"mse": ["mse"], "column": ["accuracy"], "sparse": ["accuracy"]},
    }


def inputs_of(weights):
    """Draw inputs and sample weights: none, one per row, one per row and head, or one per row and class."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, WIDTH)).astype("float32")
    draw = lambda: rng.uniform(0, 2, ROWS).astype("float32")  # noqa: E731
    return x, draw() if weights == "rows" else {name: draw() for name in TRAINED} if weights == "heads" else None


# The shift of the reductions over the heads, each of which meets all three; weights, batch size and mesh. Of 10 rows,
# the last batch is ragged in two of them, and no batch of the last divides over its 4 row shards.
CASES = [
    (0, None, 4, {"fsdp": 4, "tensor": 2}),
    (1, "heads", 3, None),
    (2, "rows", 10, {"data": 2, "fsdp": 2, "tensor": 2}),
]


@pytest.mark.parametrize("shift, weights, batch_size, mesh", CASES)
def test_training_and_evaluation_under_every_loss_equal_keras(start, shift, weights, batch_size, mesh):
    ours, theirs = build(start, mesh, lambda: settings_of(shift))
    (x, weight), y = inputs_of(weights), {name: targets()[name] for name in TRAINED}
    arguments = {"sample_weight": weight, "return_dict": True}
    assert_same_logs(*(m.evaluate(x, y, batch_size, 0, **arguments) for m in (ours, theirs)), still=1)
    arguments = {"shuffle": False, "sample_weight": weight, "callbacks": [StillFirst(0.02)]}
    assert_same_logs(*(m.fit(x, y, batch_size, 2, 0, **arguments).history for m in (ours, theirs)), still=1)
    batch = jax.tree.map(lambda leaf: leaf[:batch_size], (x, y, weight))
    assert_same_logs(*(m.test_on_batch(*batch, return_dict=True) for m in (ours, theirs)))
    assert_same_logs(*(m.train_on_batch(*batch, return_dict=True) for m in (ours, theirs)))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("head", HEADS)
def test_padding_leaves_every_loss_as_keras_computes_it(head, reduction):
    make, _, activation = HEADS[head]
    y = targets()[head]
    scores = np.random.default_rng(4).normal(size=(ROWS, CLASSES)).astype("float32")
    y_pred = scores if activation is None else np.asarray(getattr(nn, activation)(scores))
    padded, mask = np.r_[0:ROWS, 0, 0], np.r_[np.ones(ROWS), 0, 0].astype("float32")
    loss = LossSet(make(reduction=reduction), None, [Output((), None, y_pred.shape, y[:1])])
    (reference,) = [term.loss for term in loss._terms]
    for weight in (None, inputs_of("rows")[1], inputs_of("rows")[1] * 0):
        want = reference(y, y_pred, sample_weight=weight)
        weights = None if weight is None else weight[padded]
        got, _ = loss.values([y[padded]], [y_pred[padded]], [weights], mask)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("batch_size", [5, 4])
def test_class_weights_equal_keras(batch_size):
    x, _ = inputs_of(None)
    y = targets()["cce"]
    weight, bias = kernel(WIDTH, CLASSES)
    found = []
    for mesh in (None, "keras"):
        if mesh is None:
            model = dew_keras.Model(Linear(CLASSES), variables={"params": {"dense": {"kernel": weight, "bias": bias}}})
        else:
            model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(CLASSES)])
            model.set_weights([weight, bias])
        loss = K.CategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
        history = model.fit(x, y, batch_size, 2, 0, shuffle=False, class_weight={0: 3.0, 2: 0.25}).history
        found.append(history)
        batch = model.train_on_batch(x[:4], y[:4], class_weight={1: 2.0}, return_dict=True)
        found[-1] = {**history, **{f"batch_{name}": value for name, value in batch.items()}}
    assert_same_logs(*found)

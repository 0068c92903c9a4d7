"""Losses, metrics and updates are the numbers that keras.Model computes, on one device and on any mesh."""

import jax
import keras
import numpy as np
import pytest

import dew_keras
from tests.dew_keras.nets import StillFirst, TwoHeads, assert_same_logs, one_device, rows, twins

LOSSES = {
    "mse": lambda: "mse",
    "mae": lambda: keras.losses.MeanAbsoluteError(),
    "huber by token mean": lambda: keras.losses.Huber(reduction="mean_with_sample_weight"),
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "function": lambda: lambda y, y_pred: keras.ops.mean(keras.ops.abs(y - y_pred) ** 1.5, axis=-1),
}


GRID = [(loss, weighted, 4) for loss in LOSSES for weighted in (False, True)]
GRID += [("huber by token mean", True, 2), ("mse", True, 10), ("mse", False, 3)]


@pytest.mark.parametrize("loss, weighted, batch_size", GRID)
def test_history_and_evaluation_equal_those_of_keras(loss, weighted, batch_size):
    x, y, weight = rows()
    weight = weight if weighted else None
    ours, theirs = twins(
        optimizer=lambda: keras.optimizers.SGD(0.05),
        loss=LOSSES[loss],
        metrics=lambda: ["mae", keras.metrics.RootMeanSquaredError()],
        weighted_metrics=lambda: ["mse"],
        mesh={"data": 4, "fsdp": 2},
    )
    arguments = {"sample_weight": weight, "validation_data": (x, y, weight), "callbacks": [StillFirst(0.05)]}
    fitted, reference = (model.fit(x, y, batch_size, 2, 0, shuffle=False, **arguments) for model in (ours, theirs))
    # Validation follows the updates of its epoch, and the first epoch has none.
    assert_same_logs(fitted.history, reference.history, still=1)
    got = ours.evaluate(x, y, batch_size, 0, sample_weight=weight)
    want = theirs.evaluate(x, y, batch_size, 0, sample_weight=weight)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.get_weights()[1], np.asarray(theirs.weights[0].value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("metric", ["accuracy", "acc", "AUC", "F1Score", "precision"])
def test_classification_metrics_equal_those_of_keras_on_ragged_batches(metric):
    x, y, weight = rows(11)
    y = np.eye(3, dtype="float32")[y.argmax(-1)]
    make = {
        "AUC": lambda: [keras.metrics.AUC(num_thresholds=20, name="auc")],
        "F1Score": lambda: [keras.metrics.F1Score(average="macro", name="f1")],
        "precision": lambda: [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")],
    }.get(metric, lambda: [metric])
    loss = lambda: keras.losses.CategoricalCrossentropy(from_logits=True)  # noqa: E731
    ours, theirs = twins(optimizer=lambda: "sgd", loss=loss, metrics=make, mesh={"data": 8})
    arguments = {"shuffle": False, "sample_weight": weight, "callbacks": [StillFirst(0.01)]}
    got, want = (model.fit(x, y, 4, 2, 0, **arguments).history for model in (ours, theirs))
    assert_same_logs(got, want, still=1)


@pytest.mark.parametrize("targets", ["sparse", "column", "binary"])
def test_accuracy_is_chosen_by_the_shape_of_the_targets(targets):
    x, y, _ = rows(9)
    features = 1 if targets == "binary" else 3
    y = (y[:, :1] > 0).astype("float32") if targets == "binary" else y.argmax(-1).astype("int64")
    y = y[:, None] if targets == "column" else y
    loss = "bce" if targets == "binary" else lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ours, theirs = twins(features, mesh={"data": 2, "fsdp": 4}, optimizer="sgd", loss=loss, metrics=["accuracy"])
    assert_same_logs(
        ours.fit(x, y, 4, 1, 0, shuffle=False).history,
        theirs.fit(x, y, 4, 1, 0, shuffle=False).history,
    )


@pytest.mark.parametrize(
    "metrics, weighted",
    [(["mae"], ["mse", "mae"]), (["mse", "mae"], ["mape"]), (None, [keras.metrics.MeanAbsoluteError])],
)
def test_log_keys_have_keras_order(metrics, weighted):
    x, y, weight = rows(8)
    found = []
    for model in twins(optimizer="sgd", loss="mse", metrics=metrics, weighted_metrics=lambda: [*weighted]):
        seen = []
        hook = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=seen: seen.append(list(logs)),
            on_epoch_end=lambda epoch, logs, seen=seen: seen.append(list(logs)),
            on_train_end=lambda logs, seen=seen: seen.append(list(logs)),
        )
        arguments = {"validation_data": (x, y, weight), "sample_weight": weight, "callbacks": [hook]}
        history = model.fit(x, y, 8, 1, 0, **arguments).history
        found.append([*seen, list(history), list(model.evaluate(x, y, 8, 0, weight, return_dict=True))])
    assert found[0] == found[1]


def test_class_weight_moves_training_only():
    x, y, _ = rows(9)
    y = y.argmax(-1)
    ours, theirs = twins(
        optimizer="sgd", loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["acc"]
    )
    arguments = {"class_weight": {0: 3.0, 1: 0.5}, "validation_data": (x, y), "shuffle": False, "verbose": 0}
    assert_same_logs(ours.fit(x, y, 4, **arguments).history, theirs.fit(x, y, 4, **arguments).history)


def test_two_outputs_have_keras_keys_and_values():
    x, y, weight = rows(10)
    targets = {"a": y[:, :1], "b": y}
    inputs = keras.Input((4,))
    theirs = keras.Model(
        inputs, {"a": keras.layers.Dense(1, name="a")(inputs), "b": keras.layers.Dense(3, name="b")(inputs)}
    )
    values = [np.asarray(weight.value) for weight in theirs.weights]
    ours = dew_keras.Model(
        TwoHeads(),
        variables={
            "params": {"a": {"kernel": values[0], "bias": values[1]}, "b": {"kernel": values[2], "bias": values[3]}}
        },
    )
    settings = {
        "loss": {"a": "mse", "b": "mae"},
        "loss_weights": {"a": 1.0, "b": 0.5},
        "metrics": {"a": ["mae"], "b": ["mse"]},
        "weighted_metrics": {"b": ["mse"]},
    }
    theirs.compile("sgd", **settings)
    ours.compile("sgd", **settings, mesh={"data": 4, "fsdp": 2})
    arguments = {"shuffle": False, "sample_weight": weight, "callbacks": [StillFirst(0.01)]}
    got, want = (model.fit(x, targets, 4, 2, 0, **arguments).history for model in (ours, theirs))
    assert_same_logs(got, want, still=1)
    assert list(got) == list(want), "keys in Keras' order"
    assert ours.predict(x, verbose=0)["b"].shape == (10, 3)


def test_gradient_accumulation_of_the_optimizer_equals_keras():
    x, y, _ = rows(12)
    ours, theirs = twins(
        optimizer=lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=3),
        loss="mse",
        mesh={"data": 4, "fsdp": 2},
    )
    assert_same_logs(
        ours.fit(x, y, 2, 2, 0, shuffle=False).history,
        theirs.fit(x, y, 2, 2, 0, shuffle=False).history,
        rtol=1e-4,
    )


def test_predict_returns_the_rows_given_in_order_as_host_arrays():
    x, _, _ = rows(13)
    ours, theirs = twins(optimizer="sgd", loss="mse", mesh={"data": 8})
    got = ours.predict(x, batch_size=4, verbose=0)
    assert type(got) is np.ndarray
    np.testing.assert_allclose(got, theirs.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_every_mesh_trains_as_one_device_does():
    x, y, weight = rows(10)  # batches of 4, 4 and 2
    metrics = {"metrics": lambda: ["mae", keras.metrics.RootMeanSquaredError()], "weighted_metrics": ["mse"]}
    layout = dew_keras.Layout(min_shard=1, tolerance=1)
    results = []
    for mesh in [one_device(), {"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"data": 4, "tensor": 2}]:
        model, _ = twins(optimizer="adam", loss="mse", mesh=mesh, layout=layout, **metrics)
        results.append(model.fit(x, y, 4, 2, 0, [StillFirst(1e-3)], sample_weight=weight).history)
        is_split = not model.variables["params"]["dense"]["kernel"].sharding.is_fully_replicated
        assert is_split == (mesh == {"data": 2, "fsdp": 4})
    for result in results[1:]:
        assert_same_logs(result, results[0], still=1)


def test_mesh_and_rows_are_really_split():
    x, y, _ = rows(16)
    model, _ = twins(optimizer="sgd", loss="mse", mesh={"data": 8})
    model.fit(x, y, 8, 1, 0)
    assert dict(model.mesh.shape)["data"] == 8
    leaves = jax.tree.leaves(model.variables)
    assert all(len(leaf.sharding.device_set) == 8 for leaf in leaves)


def test_on_batch_verbs_return_the_numbers_of_their_batch():
    x, y, weight = rows(7)
    ours, theirs = twins(optimizer="adam", loss="mse", metrics=["mae"], mesh={"data": 8})
    for start in (0, 3):
        batch = (x[start : start + 4], y[start : start + 4], weight[start : start + 4])
        np.testing.assert_allclose(ours.train_on_batch(*batch), theirs.train_on_batch(*batch), rtol=1e-5)
    np.testing.assert_allclose(ours.test_on_batch(x, y), theirs.test_on_batch(x, y), rtol=1e-5)
    np.testing.assert_allclose(ours.predict_on_batch(x), theirs.predict_on_batch(x), rtol=1e-4, atol=1e-6)
    assert_same_logs(ours.train_on_batch(x, y, return_dict=True), theirs.train_on_batch(x, y, return_dict=True))


def in_batch(y_true, y_pred):
    """A loss per row in which the other rows of the batch enter."""
    error = keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
    return error / keras.ops.mean(error)


LOSSES_OF_BATCHES = {
    "scalar": lambda: lambda y, y_pred: keras.ops.mean(keras.ops.square(y - y_pred)),
    "contrast": lambda: in_batch,
    "circle": lambda: "circle",
    "dice": lambda: keras.losses.Dice(),
}


@pytest.mark.parametrize("loss", LOSSES_OF_BATCHES)
def test_losses_of_whole_batches_equal_keras_on_ragged_batches_too(loss):
    x, y, _ = rows(16)
    y = np.arange(16)[:, None] % 3 if loss == "circle" else y
    ours, theirs = twins(optimizer="sgd", loss=LOSSES_OF_BATCHES[loss], mesh={"data": 4, "fsdp": 2})
    for count in (16, 13):
        np.testing.assert_allclose(
            ours.evaluate(x[:count], y[:count], 8, 0), theirs.evaluate(x[:count], y[:count], 8, 0), rtol=1e-5
        )
    np.testing.assert_allclose(ours.train_on_batch(x[:5], y[:5]), theirs.train_on_batch(x[:5], y[:5]), rtol=1e-5)


def test_a_loss_of_a_users_own_may_be_padded_when_rows_stand_alone():
    x, y, _ = rows(10)
    ours, theirs = twins(optimizer="sgd", loss=lambda: OwnLoss(), mesh={"data": 8})
    assert_same_logs(ours.fit(x, y, 4, 2, 0, shuffle=False).history, theirs.fit(x, y, 4, 2, 0, shuffle=False).history)


class OwnLoss(keras.losses.Loss):
    """A loss class with arithmetic of its own."""

    def call(self, y_true, y_pred):
        """Compare row by row."""
        return keras.ops.sum(keras.ops.abs(y_true - y_pred) ** 1.5, axis=-1)

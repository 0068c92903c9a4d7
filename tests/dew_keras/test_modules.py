"""Any Flax module: several inputs, training flags, dropout, batch statistics, losses of its own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import dew_keras
from tests.dew_keras.nets import (
    Linear,
    Regularised,
    StillFirst,
    assert_same_logs,
    kernel,
    one_device,
    refused,
    rows,
    weights_of,
)


class Normed(nn.Module):
    """Batch statistics without dropout."""

    @nn.compact
    def __call__(self, x, train: bool):
        """Apply it."""
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(8)(x)))


class Pair(nn.Module):
    """Two inputs."""

    @nn.compact
    def __call__(self, left, right, deterministic=True):
        """Apply it."""
        return nn.Dense(3)(left) + nn.Dense(3)(right) + (0.0 if deterministic else 100.0)


@pytest.mark.parametrize("batch_size", [5, 8])
def test_batch_statistics_of_ragged_batches_are_those_of_one_device(batch_size):
    x, y, _ = rows(13)
    found = []
    for mesh in (one_device(), {"data": 8}):
        model = dew_keras.Model(Normed())
        model.compile("sgd", "mse", metrics=["mae"], mesh=mesh)
        history = model.fit(x, y, batch_size, 2, 0, [StillFirst(0.01)], shuffle=False).history
        assert set(model.variables) == {"params", "batch_stats"}
        found.append((history, model.get_weights(), model.evaluate(x, y, verbose=0)))
    assert_same_logs(found[1][0], found[0][0], still=1)
    np.testing.assert_allclose(found[1][2], found[0][2], rtol=1e-5)
    for got, want in zip(found[1][1], found[0][1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_another_compile_draws_no_mask_a_second_time():
    x, y, _ = rows(8)
    model, losses = dew_keras.Model(Regularised(), seed=3), []
    for _ in range(2):
        model.compile(keras.optimizers.SGD(0.0), "mse")
        losses += model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
    assert len(set(losses)) == 4


@pytest.mark.parametrize("batch_size", [4, 6])
def test_batch_normalisation_equals_that_of_keras(batch_size):
    x, y, _ = rows(12)
    layers = keras.layers
    theirs = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, name="dense"),
            layers.BatchNormalization(momentum=0.5, epsilon=1e-5, name="norm"),
            layers.Dense(3, name="head"),
        ]
    )
    dense, norm, head = (theirs.get_layer(name) for name in ("dense", "norm", "head"))
    params = {
        "Dense_1": {"kernel": dense.kernel.value, "bias": dense.bias.value},
        "BatchNorm_0": {"scale": norm.gamma.value, "bias": norm.beta.value},
        "Dense_0": {"kernel": head.kernel.value, "bias": head.bias.value},
    }
    statistics = {"BatchNorm_0": {"mean": norm.moving_mean.value, "var": norm.moving_variance.value}}
    variables = jax.tree.map(np.asarray, {"params": params, "batch_stats": statistics})
    ours = dew_keras.Model(Normed(), variables=variables)
    ours.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], mesh={"data": 4, "fsdp": 2})
    theirs.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    # 12 rows in batches of 4 and 6 fill no mesh of 8.
    arguments = {"shuffle": False, "verbose": 0, "validation_data": (x[:7], y[:7])}
    got, want = (m.fit(x, y, batch_size, 3, **arguments).history for m in (ours, theirs))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)
    kept = ours.variables["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(kept["mean"], norm.moving_mean.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(kept["var"], norm.moving_variance.value, rtol=1e-5)
    np.testing.assert_allclose(ours.predict(x, verbose=0), theirs.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


class Centred(nn.Module):
    """Rows meet in the mean and in the number of rows."""

    @nn.compact
    def __call__(self, x):
        """Apply it."""
        return nn.Dense(3, name="dense")(jnp.cumsum(x - x.mean(0), 0) * x.shape[0])


@pytest.mark.parametrize("mesh, per_execution", [({"data": 8}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 2)])
def test_rows_that_meet_inside_a_module_are_those_of_the_batch_on_every_mesh(mesh, per_execution):
    x, y, weight = rows(13)
    start = {"params": {"dense": dict(zip(("kernel", "bias"), kernel(), strict=True))}}
    inputs = keras.Input((4,))
    centred = keras.layers.Lambda(
        lambda x: keras.ops.cumsum(x - keras.ops.mean(x, 0), 0) * keras.ops.shape(x)[0], output_shape=(4,)
    )(inputs)
    theirs = keras.Model(inputs, keras.layers.Dense(3)(centred))
    theirs.set_weights(list(kernel()))
    ours = dew_keras.Model(Centred(), variables=start)
    layout = dew_keras.Layout(min_shard=1, tolerance=1)
    ours.compile(
        keras.optimizers.SGD(1e-3), "mse", metrics=["mae"], mesh=mesh, layout=layout, steps_per_execution=per_execution
    )
    theirs.compile(keras.optimizers.SGD(1e-3), "mse", metrics=["mae"])
    if "fsdp" in mesh:
        ours.build(x)
        assert not ours.variables["params"]["dense"]["kernel"].sharding.is_fully_replicated
    # Batches of 3 divide no mesh here, and of 8 all but the last.
    for batch_size in (3, 8):
        arguments = {"shuffle": False, "verbose": 0, "validation_data": (x[:5], y[:5]), "sample_weight": weight}
        got, want = (m.fit(x, y, batch_size, 2, **arguments).history for m in (ours, theirs))
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)
        for a, b in zip(ours.get_weights(), weights_of(theirs)[::-1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            ours.predict(x, batch_size, 0), theirs.predict(x, batch_size, 0), rtol=1e-4, atol=1e-5
        )


def test_dropout_acts_in_training_only_and_follows_the_seed():
    x, y, _ = rows(16)
    histories = []
    for seed in (0, 0, 1):
        model = dew_keras.Model(Regularised(), seed=seed)
        model.compile("sgd", "mse", mesh={"data": 8})
        histories.append(model.fit(x, y, 8, 2, 0).history["loss"])
    assert histories[0] == histories[1]
    assert histories[0] != histories[2]
    np.testing.assert_array_equal(model.predict(x, verbose=0), model.predict(x, verbose=0))


def test_losses_that_a_module_sows_are_added():
    x, y, _ = rows(16)
    model = dew_keras.Model(Regularised())
    model.compile("sgd", "mse", metrics=["mse"])
    loss, mse = model.evaluate(x, y, 16, 0)
    assert loss > mse + 1e-6


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_several_inputs_are_passed_by_name_or_position(form):
    x, y, _ = rows(10)
    inputs = {"left": x, "right": 2 * x} if form == "dict" else (x, 2 * x)
    lone = dew_keras.Model(Linear())
    np.testing.assert_array_equal(lone.predict([x], verbose=0), lone.predict(x, verbose=0))
    model = dew_keras.Model(Pair())
    model.compile(keras.optimizers.SGD(1e-6), "mse", mesh={"fsdp": 8})
    trained = model.fit(inputs, y, 5, 1, 0).history["loss"][0]
    assert trained > 5000, "the module was told that it trains"
    assert model.predict(inputs, verbose=0).shape == (10, 3)
    assert model.evaluate(inputs, y, verbose=0) < 50
    for verb in (model.evaluate, model.fit):  # a tuple is a tuple of inputs, never (x, y), as in Keras
        with pytest.raises(ValueError, match=r"'mse' needs targets, and y is missing.*a tuple of inputs"):
            verb((x, y), verbose=0)
    assert np.abs(model.predict(inputs, verbose=0)).max() < 50


def test_fit_without_a_loss_is_an_error_at_fit():
    model = dew_keras.Model(Linear())
    model.compile("sgd")
    x, y, _ = rows(4)
    with pytest.raises(ValueError, match=r"must give compile\(\) a loss"):
        model.fit(x, y, verbose=0)


def test_verbs_before_compile_say_so():
    model = dew_keras.Model(Linear())
    x, y, _ = rows(4)
    for verb in (lambda: model.fit(x, y), lambda: model.evaluate(x, y), lambda: model.trainer):
        with pytest.raises(ValueError, match=r"You must call `compile\(\)`"):
            verb()
    assert model.predict(x, verbose=0).shape == (4, 3)


def test_generate_needs_a_language_model():
    with pytest.raises(ValueError, match="no language model"):
        dew_keras.Model(Linear()).generate([[1]])


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="Flax Linen module"):
        dew_keras.Model("org/name")


def test_everything_the_facade_holds_is_reachable():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("adam", "mse", mesh={"fsdp": 4, "data": 2})
    model.fit(x, y, 8, 1, 0)
    assert model.objective.module is model.module
    assert model.trainer.mesh is model.mesh
    state = model.trainer.place(jax.tree.map(np.asarray, model.variables))
    assert float(model.trainer.loop(state).step({"x": x, "y": y}).read()["loss"].value()) > 0


def test_compiling_again_keeps_weights_and_moves_them():
    x, y, _ = rows(16)
    optimizer = keras.optimizers.Adam(0.1)
    whole = dew_keras.Model(Linear())
    whole.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse", mesh={"data": 8})
    want = whole.fit(x, y, 8, 4, 0, shuffle=False).history["loss"]
    model = dew_keras.Model(Linear())
    model.compile(optimizer=optimizer, loss="mse", mesh={"data": 8})
    got = model.fit(x, y, 8, 2, 0, shuffle=False).history["loss"]
    before = model.get_weights()
    model.compile(optimizer=optimizer, loss="mse", mesh={"fsdp": 4, "tensor": 2})
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert all(leaf.sharding.mesh == model.mesh for leaf in jax.tree.leaves(model.variables))
    got += model.fit(x, y, 8, 2, 0, shuffle=False).history["loss"]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_refused_compile_changes_nothing():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("sgd", "mse", mesh={"fsdp": 8})
    model.fit(x, y, 8, 1, 0)
    with refused(model, "3"):
        model.compile("adam", "mae", mesh={"fsdp": 3})
    assert dict(model.mesh.shape)["fsdp"] == 8

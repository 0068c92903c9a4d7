"""Optimizers in `fit`: Keras' numbers with its options, on every mesh, and the user's object left as it was."""

import jax
import keras
import numpy as np
import pytest

import dew_keras
from dew.placement.mesh import MeshSpec, build_mesh
from dew_keras.optimizers import keras_states
from tests.dew_keras.nets import Linear, kernel, rows, twins
from tests.dew_keras.test_optimizers import Halved, Signed
from tests.tiny import tiny_batch, tiny_decoder

# Keras reads its variables in a way that numpy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
MESH = {"fsdp": 4, "tensor": 2}
SPLIT = dew_keras.Layout(min_shard=1, tolerance=0.0)


def weights(model):
    return sorted(map(np.asarray, model.get_weights()), key=np.size)


def assert_same_weights(ours, theirs, rtol=1e-5):
    for got, want in zip(weights(ours), weights(theirs), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-6)


def test_accumulation_of_the_optimizer_gives_keras_numbers():
    def optimizer():
        return keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5),
            gradient_accumulation_steps=2,
            weight_decay=0.1,
            clipnorm=1.0,
        )

    x, y, _ = rows(13)
    ours, theirs = twins(optimizer=optimizer, loss="mse", mesh=MESH)
    # Batches of 5, 5 and 3 rows weigh the same in a window, and the last one waits for the next fit.
    for _ in range(2):
        got = ours.fit(x, y, 5, 1, 0, shuffle=False).history["loss"]
        want = theirs.fit(x, y, 5, 1, verbose=0, shuffle=False).history["loss"]
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert_same_weights(ours, theirs)
        assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations)
        np.testing.assert_allclose(float(ours.optimizer.learning_rate), float(theirs.optimizer.learning_rate))
    assert int(ours.optimizer.iterations) == 3


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swapped_averages_are_those_of_keras(swap_on_epoch):
    x, y, _ = rows(16)
    ours, theirs = twins(
        optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), loss="mse", mesh=MESH
    )
    optimizer = ours.optimizer

    class Reader(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([leaf.copy() for leaf in weights(self.model)])

    found = []
    for model in (ours, theirs):
        seen = []
        history = model.fit(
            x, y, 8, 3, verbose=0, shuffle=False, validation_data=(x, y),
            callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch), Reader()],
        ).history  # fmt: skip
        scores = [model.evaluate(x, y, verbose=0, callbacks=c) for c in ([keras.callbacks.SwapEMAWeights()], None)]
        found.append((history["loss"], history["val_loss"], scores, seen))
    for got, want in zip(*found, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    assert_same_weights(ours, theirs)
    assert not optimizer.built
    assert not hasattr(optimizer, "_model_variables_moving_average")


def test_the_average_follows_every_batch_of_a_window_as_in_keras():
    def optimizer():
        average = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, **average)

    x, y, _ = rows(13)
    ours, theirs = twins(optimizer=optimizer, loss="mse", mesh=MESH)
    losses = [model.fit(x, y, 5, 5, verbose=0, shuffle=False).history["loss"] for model in (ours, theirs)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert_same_weights(ours, theirs)


def test_an_average_that_is_assigned_shares_no_memory_with_the_weights():
    class Forget(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            optimizer = self.model.optimizer
            for weight, mean in zip(
                optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True
            ):
                mean.assign(weight)
                np.testing.assert_array_equal(np.asarray(mean), np.asarray(weight))

    x, y, _ = rows(16)
    ours, plain = (twins(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True), loss="mse")[0] for _ in range(2))
    ours.fit(x, y, 8, 2, 0, [Forget()], shuffle=False)
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.fit(x, y, 8, 2, 0, shuffle=False)
    assert_same_weights(ours, plain)


def test_swapping_changes_what_is_evaluated():
    x, y, _ = rows(16)
    ours, _ = twins(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), loss="mse")
    for _ in range(3):
        ours.train_on_batch(x, y)
    plain = ours.evaluate(x, y, verbose=0)
    swapped = ours.evaluate(x, y, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])
    assert swapped > plain * 1.01
    assert ours.evaluate(x, y, verbose=0) == plain, "and the weights are back"


def multi():
    """Build Adam for biases and SGD with momentum for the rest."""
    table = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1, momentum=0.5), {".*bias": keras.optimizers.Adam()})
    return keras.optimizers.MultiOptimizer(table)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Muon(0.1, global_clipnorm=0.1),
        lambda: keras.optimizers.Adafactor(0.1, use_ema=True, ema_momentum=0.5),
        lambda: Signed(0.1, clipnorm=0.1),
        multi,
    ],
    ids=["muon", "adafactor", "own", "multi"],
)
def test_a_mesh_trains_as_one_device(optimizer):
    x, y, _ = rows(16, width=8, classes=8)
    found = []
    for mesh in (build_mesh(MeshSpec(), jax.devices()[:1]), MESH):
        weight, bias = kernel(8, 8)
        model = dew_keras.Model(Linear(8), variables={"params": {"dense": {"kernel": weight, "bias": bias}}})
        model.compile(optimizer(), "mse", mesh=mesh, layout=SPLIT)
        found.append((model.fit(x, y, 8, 3, 0, shuffle=False).history["loss"], weights(model)))
    assert not model.variables["params"]["dense"]["kernel"].sharding.is_fully_replicated
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    for got, want, start in zip(found[1][1], found[0][1], sorted((weight, bias), key=np.size), strict=True):
        assert np.abs(want - start).max() > 1e-3
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_formula_of_the_users_own_trains_a_banked_language_model_where_its_weights_are():
    model = dew_keras.Model(tiny_decoder(num_layers=2))
    model.compile(Halved(0.01), mesh=MESH, layout=SPLIT)
    losses = model.fit(tiny_batch(rows=8)["tokens"], batch_size=8, epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[0] - 0.05
    state = model._engine.state
    moments = state.opt_state.slots["momentum"]
    assert jax.tree.map(lambda m: m.sharding, moments) == jax.tree.map(lambda w: w.sharding, state.params)


def test_every_optimizer_of_a_multi_optimizer_has_its_own_rate():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile(multi(), "mse")
    model.train_on_batch(x, y)
    before = jax.tree.map(np.asarray, model.variables["params"]["dense"])
    inner = {type(o).__name__: o for o in model.optimizer.optimizers}
    inner["Adam"].learning_rate = 0.0
    model.train_on_batch(x, y)
    after = jax.tree.map(np.asarray, model.variables["params"]["dense"])
    np.testing.assert_array_equal(after["bias"], before["bias"])
    assert np.abs(after["kernel"] - before["kernel"]).max() > 1e-3
    assert [int(o.iterations) for o in (model.optimizer, *inner.values())] == [2, 2, 2]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0)
    model.fit(x, y, epochs=1, verbose=0, callbacks=[schedule])
    assert [float(part.hyperparams["learning_rate"]) for part in keras_states(model._engine.state.opt_state)] == [0, 0]


def test_the_optimizer_of_a_fit_serves_a_keras_model_afterwards():
    x, y, _ = rows(8)
    for optimizer in (keras.optimizers.Adam(0.1, use_ema=True), Signed(0.1)):
        ours, theirs = twins(optimizer=lambda optimizer=optimizer: optimizer, loss="mse")
        before = set(vars(optimizer))
        ours.fit(x, y, verbose=0)
        assert set(vars(optimizer)) == before
        assert not optimizer.built
        theirs.fit(x, y, verbose=0)
        assert optimizer.built


def test_an_interrupted_fit_takes_back_what_it_lent():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert self.model.optimizer.built
            raise KeyboardInterrupt

    x, y, _ = rows(8)
    ours, _ = twins(optimizer=lambda: keras.optimizers.Adam(0.1, use_ema=True), loss="mse")
    with pytest.raises(KeyboardInterrupt):
        ours.fit(x, y, verbose=0, callbacks=[Stop()])
    assert not ours.optimizer.built


@pytest.mark.parametrize("language", [False, True])
def test_compiling_again_in_another_dtype_keeps_moments_and_casts_weights(language):
    optimizer = keras.optimizers.Adam(0.01)
    x, y, _ = rows(8)
    data = (tiny_batch(rows=8)["tokens"], None) if language else (x, y)
    model = dew_keras.Model(tiny_decoder(num_layers=1) if language else Linear())
    loss = "auto" if language else "mse"
    model.compile(optimizer, loss, mesh={"fsdp": 8})
    model.fit(*data, batch_size=8, epochs=2, verbose=0)
    wanted = jax.tree.map(np.asarray, model.variables["params"])
    dtypes = ("bfloat16",) if language else ("bfloat16", "mixed_bfloat16")
    for dtype in dtypes:
        model.compile(optimizer, loss, mesh={"fsdp": 8}, dtype=dtype)
        narrow = "bfloat16" if dtype == "bfloat16" else "float32"
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.variables)} == {narrow}
        if dtype == "bfloat16":
            jax.tree.map(
                lambda got, want: np.testing.assert_array_equal(got, want.astype("bfloat16")),
                jax.tree.map(np.asarray, model.variables["params"]), wanted,
            )  # fmt: skip
        model.fit(*data, batch_size=8, epochs=1, verbose=0)
        slots = model._engine.state.opt_state.slots
        assert {str(leaf.dtype) for leaf in jax.tree.leaves((model.variables, slots))} == {narrow}
    assert int(model.optimizer.iterations) == int(model._engine.state.opt_state.count) == 2 + len(dtypes)

"""Steps in other forms: several in one program, operation by operation, and a subclass's own."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax.core import freeze

import dew_keras
from tests.dew_keras.nets import Linear, Regularised, kernel, rows, twins, weights_of
from tests.tiny import tiny_decoder

MAE = keras.metrics.MeanAbsoluteError


class Recorder(keras.callbacks.Callback):
    """Writes down hooks and the loss that each one shows."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        """Write down the number."""
        self.seen.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        """Write down the number and the loss."""
        self.seen.append(("end", batch, logs["loss"]))

    def on_test_batch_end(self, batch, logs=None):
        """Write down the number."""
        self.seen.append(("test", batch))


def fitted(count=20, batch=4, epochs=2, module=None, cls=dew_keras.Model, callbacks=(), **compile_arguments):
    """Fit a small module from fixed weights; returns the model and its history."""
    x, y, _ = rows(count)
    weight, bias = kernel()
    variables = {"params": {"dense": {"kernel": weight, "bias": bias}}} if module is None else None
    model = cls(module or Linear(), variables=variables)
    adam = keras.optimizers.Adam(0.05)
    # Batches of any size: no row shards.
    compile_arguments = {
        "mesh": {"tensor": 8},
        "optimizer": adam,
        "loss": "mse",
        "metrics": [MAE(name="mae")],
        **compile_arguments,
    }
    model.compile(**compile_arguments)
    validation = (x[: 2 * batch], y[: 2 * batch])
    history = model.fit(x, y, batch, epochs, 0, list(callbacks), shuffle=False, validation_data=validation)
    return model, history.history


def assert_same(one, other, rtol=1e-6):
    """Compare a model and history with another."""
    assert set(one[1]) == set(other[1])
    for name, values in one[1].items():
        np.testing.assert_allclose(values, other[1][name], rtol=rtol, err_msg=name)
    for a, b in zip(one[0].get_weights(), other[0].get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * rtol, atol=1e-7)


@pytest.mark.parametrize("count", [20, 18, 22], ids=["whole", "ragged", "ragged after a whole one"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_per_execution_changes_no_number_and_traces_at_most_twice(count, accumulation):
    plain = fitted(count, accumulation=accumulation)
    recorder = Recorder()
    grouped = fitted(count, accumulation=accumulation, steps_per_execution=2, callbacks=[recorder])
    assert_same(grouped, plain)
    # The last index of a group may exceed the last batch, as in Keras.
    numbers = [entry[1] for entry in recorder.seen if entry[0] == "end"]
    assert numbers == [1, 3, 5] * 2
    assert [entry[1] for entry in recorder.seen if entry[0] == "begin"] == [0, 2, 4] * 2
    assert [entry[1] for entry in recorder.seen if entry[0] == "test"] == [1, 1]
    programs = grouped[0].trainer._programs
    assert programs._loop._cache_size() == (1 if count == 20 else 2)
    assert all(programs.of_microstep(microstep)._cache_size() == 0 for microstep in range(accumulation))


def test_one_batch_is_placed_once_whatever_the_steps_per_execution():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("sgd", "mse", steps_per_execution=4)
    losses = [model.train_on_batch(x, y) for _ in range(2)]
    assert losses[1] < losses[0]
    assert model.trainer._programs._loop._cache_size() == 0


def test_steps_per_execution_predicts_the_rows_given():
    x, _, _ = rows(10)
    model, _ = fitted()
    before = model.predict(x, 4, 0)
    seen = []
    model.compile(optimizer=model.optimizer, loss="mse", steps_per_execution=2)
    hook = keras.callbacks.LambdaCallback()
    hook.on_predict_batch_end = lambda batch, logs=None: seen.append((batch, logs["outputs"].shape))
    np.testing.assert_allclose(model.predict(x, 4, 0, callbacks=[hook]), before, rtol=1e-6, atol=1e-6)
    assert seen == [(1, (8, 3)), (3, (2, 3))]


CALLS = []


class Loud(nn.Module):
    """Writes down every call whose input has a value."""

    @nn.compact
    def __call__(self, x):
        """Apply a dense layer."""
        if not isinstance(x, jax.core.Tracer):
            CALLS.append(x.shape)
        return nn.Dense(3, name="dense")(x)


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}], ids=["eager", "no-jit"])
def test_running_eagerly_runs_python_in_every_step_and_changes_no_number(options):
    CALLS.clear()
    plain = fitted(module=Loud(), epochs=1)
    once = len(CALLS)
    eager = fitted(module=Loud(), epochs=1, **options)
    assert_same(eager, plain, rtol=1e-5)
    assert len(CALLS) - once == once + 5 + 2  # five steps and two validation batches


def test_eager_and_compiled_together_warns():
    model = dew_keras.Model(Linear())
    with pytest.warns(UserWarning, match="run_eagerly=True runs operation by operation"):
        model.compile(loss="mse", run_eagerly=True, jit_compile=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_execution": 0}, "steps_per_execution must be a positive integer"),
        ({"steps_per_execution": "auto"}, "steps_per_execution must be a positive integer"),
        ({"jit_compile": "yes"}, "jit_compile must be 'auto', True or False"),
    ],
)
def test_execution_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dew_keras.Model(Linear()).compile(loss="mse", **options)


class HalfLoss(dew_keras.Model):
    """Half the compiled loss, and a term of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Add a term."""
        return 0.5 * super().compute_loss(x, y, y_pred, sample_weight, training) + 0.01 * jnp.mean(y_pred**2)


class KerasHalfLoss(keras.Model):
    """The same in Keras."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        """Apply the layer."""
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Add a term."""
        return 0.5 * super().compute_loss(x, y, y_pred, sample_weight, training) + 0.01 * keras.ops.mean(y_pred**2)


def test_an_own_compute_loss_is_trained_and_evaluated_as_in_keras():
    x, y, _ = rows(20)
    ours, history = fitted(cls=HalfLoss)
    theirs = KerasHalfLoss()
    theirs(x[:1])
    theirs.set_weights(list(kernel()))
    theirs.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])
    expected = theirs.fit(x, y, 4, 2, 0, shuffle=False, validation_data=(x[:8], y[:8])).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(ours.evaluate(x, y, 6, 0), theirs.evaluate(x, y, 6, 0), rtol=1e-5)


class OwnStep(dew_keras.Model):
    """A step written as for Keras on JAX."""

    def train_step(self, state, data):
        """Clip the gradient by hand, and track a metric of its own."""
        trainable, rest, optimizer_variables, metric_variables = state
        x, y = data

        def loss_of(params):
            y_pred, updated = self.stateless_call(params, rest, x, training=True)
            return self.compute_loss(x, y, y_pred), (y_pred, updated)

        (loss, (y_pred, rest)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer_variables = self.optimizer.stateless_apply(optimizer_variables, gradients, trainable)
        logs, kept = {}, []
        for metric in self.metrics:
            values = metric_variables[len(kept) : len(kept) + len(metric.variables)]
            if metric.name == "loss":
                values = metric.stateless_update_state(values, loss, sample_weight=x.shape[0])
            else:
                values = metric.stateless_update_state(values, y, y_pred)
            logs[metric.name] = metric.stateless_result(values)
            kept += values
        return logs, (trainable, rest, optimizer_variables, kept)


class OwnMetrics(dew_keras.Model):
    """Reports a number of its own."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        """Add the largest output of the batch to the compiled metrics."""
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "largest": jnp.max(y_pred)}


def test_an_own_train_step_gives_the_numbers_of_the_engine_s():
    plain = fitted()
    own = fitted(cls=OwnStep)
    assert_same(own, plain)
    assert own[0].optimizer.iterations == 10
    assert "stateless_apply" not in vars(own[0].optimizer)


def test_an_own_train_step_keeps_dropout_and_statistics():
    plain = fitted(count=16, batch=8, module=Regularised(), epochs=1)
    own = fitted(count=16, batch=8, module=Regularised(), epochs=1, cls=OwnMetrics)
    assert own[1].pop("largest")
    assert own[1].pop("val_largest")
    assert_same(own, plain)


class Twice(dew_keras.Model):
    """Calls the module twice in a step, and reports how much the outputs differ."""

    def train_step(self, state, data):
        """Change nothing."""
        one, _ = self.stateless_call(state[0], state[1], data[0], training=True)
        other, _ = self.stateless_call(state[0], state[1], data[0], training=True)
        return {"difference": jnp.abs(one - other).max()}, state


def test_two_calls_in_a_step_drop_other_numbers():
    _, history = fitted(count=8, batch=8, module=Regularised(), epochs=1, cls=Twice)
    assert history["difference"][0] > 0


@pytest.mark.parametrize("module", [Regularised(), tiny_decoder(num_layers=1, dropout_rate=0.5)])
def test_a_training_call_outside_of_a_step_takes_a_key_and_is_refused_without_one(module):
    is_decoder = not isinstance(module, Regularised)
    x = np.ones((8, 16), np.int32) if is_decoder else rows(8)[0]
    model = dew_keras.Model(module)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True) if is_decoder else "mse")
    model.predict(x, verbose=0)
    params = model.variables["params"]
    rest = {name: tree for name, tree in model.variables.items() if name != "params"}
    call = functools.partial(model.stateless_call, params, rest, x)
    with pytest.raises(ValueError, match=r"draws random numbers .* stateless_call\(\.\.\., key=jax\.random\.key"):
        call(training=True)
    one, again, other = (call(training=True, key=jax.random.key(seed))[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(np.asarray(one) - np.asarray(other)).max() > 0
    assert call()[0].shape == one.shape


def test_metrics_show_the_last_pass_and_reset():
    model, history = fitted(cls=OwnMetrics)
    results = model.get_metrics_result()
    np.testing.assert_allclose(results["mae"], history["val_mae"][-1], rtol=1e-6)
    np.testing.assert_allclose(results["loss"], history["val_loss"][-1], rtol=1e-6)
    model.reset_metrics()
    assert float(model.get_metrics_result()["mae"]) == 0


class OwnTest(dew_keras.Model):
    """Scores and predicts its own way."""

    def test_step(self, state, data):
        """Report one number."""
        x, y = data
        y_pred, _ = self.stateless_call(state[0], state[1], x)
        return {"error": jnp.abs(y - y_pred).max()}, state

    def predict_step(self, state, data):
        """Double the outputs."""
        y_pred, rest = super().predict_step(state, data)
        return 2 * y_pred, rest


def test_own_test_and_predict_steps_are_used():
    x, y, _ = rows(8)
    plain, _ = fitted(epochs=1)
    model, history = fitted(epochs=1, cls=OwnTest)
    np.testing.assert_allclose(model.predict(x, 8, 0), 2 * plain.predict(x, 8, 0), rtol=1e-6)
    error = np.abs(y - plain.predict(x, 8, 0)).max()
    np.testing.assert_allclose(model.evaluate(x, y, 8, 0, return_dict=True)["error"], error, rtol=1e-5)
    assert set(history) == {"loss", "mae", "val_error", "val_loss"} - {"val_loss"}


def test_own_steps_refuse_what_they_cannot_honour():
    x, y, _ = rows(10)
    model = OwnStep(Linear())
    with pytest.raises(ValueError, match=r"accumulation=1, .* Received: accumulation=2"):
        model.compile(loss="mse", accumulation=2)
    model.compile(loss="mse")
    model.fit(x, y, 8, verbose=0)  # the last batch does not divide over the row shards


class BadStep(dew_keras.Model):
    """Forgets the state."""

    def train_step(self, state, data):
        """Return logs only."""
        return {"loss": 0.0}


def test_a_step_that_returns_something_else_is_refused_and_changes_nothing():
    x, y, _ = rows(8)
    model = BadStep(Linear())
    model.compile(loss="mse")
    model.build(x)
    before = model.get_weights()
    with pytest.raises(TypeError, match=r"must return \(logs, state\)"):
        model.fit(x, y, 8, verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


class RowMean(dew_keras.Model):
    """A loss and outputs that see all rows of a batch."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Compare with the targets."""
        return jnp.mean((y - y_pred) ** 2)

    def predict_step(self, state, data):
        """Subtract the mean of the rows."""
        y_pred, rest = super().predict_step(state, data)
        return y_pred - y_pred.mean(0), rest


def test_code_of_one_s_own_sees_the_rows_of_a_batch_and_no_others_on_every_mesh():
    x, y, _ = rows(13)
    weight, bias = kernel()
    found = []
    for mesh in (None, {"tensor": 8}):
        model = RowMean(Linear(), variables={"params": {"dense": {"kernel": weight, "bias": bias}}})
        model.compile(keras.optimizers.SGD(0.1), mesh=mesh)  # a loss of its own needs none here
        losses = model.fit(x, y, 8, 2, 0, shuffle=False).history["loss"]
        losses += model.fit(((x[:5], y[:5]) for _ in range(1)), verbose=0).history["loss"]
        found.append((losses, model.evaluate(x, y, 8, 0), model.predict(x, 8, 0), *model.get_weights()))
        np.testing.assert_allclose(model.predict(x[:5], 5, 0).mean(0), 0, atol=1e-6)
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


class Sown(nn.Module):
    """Adds the mean of its squared outputs to the loss."""

    @nn.compact
    def __call__(self, x):
        """Apply a dense layer."""
        x = nn.Dense(3, name="dense")(x)
        self.sow("losses", "size", jnp.mean(x**2))
        return x


@pytest.mark.parametrize("batch", [3, 5, 8])
def test_an_added_loss_does_not_depend_on_filling(batch):
    x, y, _ = rows(5)
    weight, bias = kernel()
    losses = []
    for mesh in (None, {"tensor": 8}):
        model = dew_keras.Model(Sown(), variables=freeze({"params": {"dense": {"kernel": weight, "bias": bias}}}))
        model.compile(keras.optimizers.SGD(0.1), "mse", mesh=mesh)
        history = model.fit(x, y, batch, 2, 0, shuffle=False, validation_data=[x, y]).history
        losses.append([*history["loss"], *history["val_loss"], model.evaluate(x, y, batch, 0)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    outputs = x @ weight + bias
    if batch >= 5:
        np.testing.assert_allclose(losses[1][0], np.mean((outputs - y) ** 2 + outputs**2), rtol=1e-5)


def test_a_decoder_is_filled_up_but_where_code_of_ones_own_sees_its_rows():
    fills = {}
    for kind in (
        dew_keras.Model,
        OwnTest,
        type("OwnPredict", (dew_keras.Model,), {"predict_step": OwnTest.predict_step}),
    ):
        engine = kind(tiny_decoder(num_layers=1))._engine
        fills[kind.__name__] = engine.sharing.fills, engine.predict_sharing.fills
    assert fills == {"Model": (True, True), "OwnTest": (False, False), "OwnPredict": (True, False)}


def test_a_test_step_of_one_s_own_leaves_training_to_the_engine():
    plain = fitted(accumulation=2, epochs=1)
    own = fitted(accumulation=2, epochs=1, cls=OwnTest)
    for name in ("loss", "mae"):
        np.testing.assert_allclose(own[1][name], plain[1][name], rtol=1e-6)
    assert_same((own[0], {}), (plain[0], {}))


def test_the_user_s_own_optimizer_object_shows_how_far_a_fit_came():
    x, y, _ = rows(8)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = keras.optimizers.SGD(schedule)
    model = dew_keras.Model(Linear())
    model.compile(optimizer, "mse")
    model.fit(x, y, 4, verbose=0)
    assert int(optimizer.iterations) == 2
    np.testing.assert_allclose(float(optimizer.learning_rate), 0.025)
    with jax.set_mesh(model.mesh):  # as code of one's own around a fit may
        model.fit(x, y, 4, verbose=0)
        assert int(optimizer.iterations) == 4


@pytest.mark.parametrize("window", [None, 2])
def test_iterations_that_a_user_assigns_are_those_of_the_next_update(window):
    x, y, _ = rows(8)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)

    def make():
        optimizer = keras.optimizers.Adam(schedule, gradient_accumulation_steps=window)
        optimizer._iterations.assign(6)  # before compile
        return optimizer

    class Jump(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.optimizer._iterations.assign(20)

    found = []
    for model in twins(optimizer=make, loss="mse"):
        assert int(model.optimizer._iterations) == 6
        history = model.fit(x, y, 2, 1, 0, [Jump()], shuffle=False).history
        found.append((history["loss"], int(model.optimizer.iterations), int(model.optimizer._iterations)))
        found[-1] += tuple(sorted(float(np.abs(w).sum()) for w in weights_of(model)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    np.testing.assert_allclose(found[0][1:], found[1][1:], rtol=1e-5)
    assert found[0][2] == 22


def test_iterations_count_updates_across_compiles_with_other_accumulations():
    x, y, _ = rows(16)
    optimizer = keras.optimizers.SGD(0.01)
    model = dew_keras.Model(Linear())
    for accumulation, batches, want in ((2, 4, 2), (1, 3, 5), (4, 4, 6)):
        model.compile(optimizer, "mse", accumulation=accumulation)
        assert int(model.optimizer.iterations) == want - batches // accumulation
        model.fit(x[: 4 * batches], y[: 4 * batches], 4, verbose=0)
        assert int(optimizer.iterations) == want
    other = dew_keras.Model(Linear())
    other.compile(optimizer, "mse")
    assert int(other.optimizer.iterations) == 0, "another model begins anew"

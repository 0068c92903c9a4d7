"""Callbacks see the order, the numbers and the text that keras.Model gives them, and may change the run."""

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import dew_keras
from dew_keras.callbacks import LazyLogs, RunningLogs
from tests.dew_keras.nets import Linear, rows, twins

# Keras' own callbacks read its variables in a way that NumPy 2 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

HOOKS = [
    *(f"on_{phase}_{at}" for phase in ("train", "test", "predict") for at in ("begin", "end")),
    *(f"on_{phase}_batch_{at}" for phase in ("train", "test", "predict") for at in ("begin", "end")),
    "on_epoch_begin",
    "on_epoch_end",
]


class Recorder(keras.callbacks.Callback):
    """Writes down every hook with its logs."""

    async_safe = False

    def __init__(self):
        super().__init__()
        self.events = []


def _recording(name):
    def hook(self, *args, logs=None):
        *number, last = args if len(args) > (0 if "train_begin" in name else 1) else (*args, logs)
        last = logs if logs is not None else last
        shown = {key: value for key, value in dict(last or {}).items() if key != "outputs"}
        self.events.append((name, *[n for n in number if isinstance(n, int)], shown))

    return hook


for _name in HOOKS:
    setattr(Recorder, _name, _recording(_name))


def assert_same_events(got, want):
    assert [event[:-1] for event in got] == [event[:-1] for event in want]
    for ours, theirs in zip(got, want, strict=True):
        assert list(ours[-1]) == list(theirs[-1]), ours[0]
        for name, value in theirs[-1].items():
            np.testing.assert_allclose(ours[-1][name], value, rtol=1e-5, atol=1e-6)
            assert isinstance(ours[-1][name], float)


def run_both(twin, verb):
    recorders = []
    for model in twin:
        recorder = Recorder()
        verb(model, recorder)
        recorders.append(recorder)
    return recorders


def test_fit_calls_hooks_with_the_order_and_logs_of_keras():
    x, y, _ = rows(10)
    twin = twins(optimizer="sgd", loss="mse", metrics=["mae"], mesh={"data": 8})
    ours, theirs = run_both(
        twin,
        lambda model, recorder: model.fit(
            x, y, 4, 3, 0, [recorder], validation_data=(x, y), shuffle=False, validation_freq=2, initial_epoch=1
        ),
    )
    assert_same_events(ours.events, theirs.events)
    assert ours.params == theirs.params


def test_evaluate_and_predict_call_hooks_as_keras():
    x, y, _ = rows(10)
    twin = twins(optimizer="sgd", loss="mse", mesh={"data": 8})
    for verb in (
        lambda model, recorder: model.evaluate(x, y, 4, 0, callbacks=[recorder]),
        lambda model, recorder: model.predict(x, 4, 0, callbacks=[recorder]),
    ):
        ours, theirs = run_both(twin, verb)
        assert_same_events(ours.events, theirs.events)


def test_batch_logs_are_running_means_since_the_start_of_the_epoch():
    x = np.ones((6, 4), "float32")
    y = np.arange(18, dtype="float32").reshape(6, 3)
    model, _ = twins(optimizer=lambda: keras.optimizers.SGD(0.0), loss="mse")
    seen = []
    spy = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    model.fit(x, y, 2, 1, 0, [spy], shuffle=False)
    own = [model.evaluate(x[i : i + 2], y[i : i + 2], verbose=0) for i in (0, 2, 4)]
    np.testing.assert_allclose(seen, [own[0], np.mean(own[:2]), np.mean(own)], rtol=1e-5)


def test_a_rate_assigned_in_a_hook_takes_effect_on_the_next_step():
    x, y, _ = rows(8)
    model, _ = twins(optimizer=lambda: keras.optimizers.SGD(0.1), loss="mse")
    seen = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                self.model.optimizer.learning_rate = 0.0

        def on_train_batch_end(self, batch, logs=None):
            seen.append(self.model.get_weights()[1])
            assert int(self.model.optimizer.iterations) == batch + 1

    model.build(x)
    before = model.get_weights()[1]
    model.fit(x, y, 2, 1, 0, [Stop()], shuffle=False)
    assert not np.array_equal(before, seen[0])
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[3])


def test_weights_assigned_in_a_hook_are_what_the_next_step_trains():
    x, y, _ = rows(8)
    model, _ = twins(optimizer=lambda: keras.optimizers.SGD(0.0), loss="mse", mesh={"data": 4, "fsdp": 2})
    losses = []

    class Zero(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(dict(logs)["loss"])
            self.model.set_weights([np.zeros_like(weight) for weight in self.model.get_weights()])

    model.fit(x, y, 4, 1, 0, [Zero()], shuffle=False)
    second = 2 * losses[1] - losses[0]
    np.testing.assert_allclose(second, np.mean(y[4:] ** 2), rtol=1e-5)


def test_an_optax_rate_follows_the_hooks_too():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), "mse")
    reduce = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1e9)
    history = model.fit(x, y, 4, 3, 0, [reduce]).history
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.1, 0.05], rtol=1e-6)
    assert model.optimizer.learning_rate == pytest.approx(0.025)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_stop_training_ends_the_epoch_and_still_validates(hook):
    x, y, _ = rows(8)

    def stop(model):
        class Stopper(Recorder):
            pass

        def halt(self, number, logs=None):
            self.events.append((hook, number))
            self.model.stop_training = True

        setattr(Stopper, hook, halt)
        stopper = Stopper()
        history = model.fit(x, y, 2, 3, 0, [stopper], validation_data=(x, y))
        return [event[0] for event in stopper.events], {key: len(v) for key, v in history.history.items()}

    ours, theirs = twins(optimizer="sgd", loss="mse")
    assert stop(ours) == stop(theirs)


def test_a_log_that_a_callback_adds_reaches_history_and_text(capsys):
    x, y, _ = rows(8)
    model, _ = twins(optimizer="sgd", loss="mse")

    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["mine"] = 7.0

    history = model.fit(x, y, 4, 2, 2, [[Adds()]])
    assert history.history["mine"] == [7.0, 7.0]
    assert "mine: 7.0000" in capsys.readouterr().out
    assert model.history is history
    assert history.epoch == [0, 1]


def test_early_stopping_restores_the_best_weights():
    x, y, _ = rows(8)
    model, _ = twins(optimizer=lambda: keras.optimizers.SGD(5.0), loss="mse", mesh={"fsdp": 8})
    weights = []
    spy = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(model.get_weights()))
    stopping = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    history = model.fit(x, y, 8, 10, 0, [spy, stopping])
    best = int(np.argmin(history.history["loss"]))
    assert len(history.history["loss"]) == best + 2
    for got, want in zip(model.get_weights(), weights[best], strict=True):
        np.testing.assert_array_equal(got, want)


def test_schedulers_loggers_and_checkpoints_of_keras_work(tmp_path):
    x, y, _ = rows(8)
    model, _ = twins(optimizer="sgd", loss="mse")
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True),
        keras.callbacks.TerminateOnNaN(),
    ]
    history = model.fit(x, y, 4, 2, 0, callbacks)
    np.testing.assert_allclose(history.history["learning_rate"], [0.1, 0.05], rtol=1e-6)
    assert (tmp_path / "log.csv").read_text().startswith("epoch,learning_rate,loss")
    saved = model.get_weights()
    model.set_weights([np.zeros_like(weight) for weight in saved])
    model.load_weights(tmp_path / "2.weights.h5")
    for got, want in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_exception_in_a_hook_leaves_the_weights_of_the_last_step():
    x, y, _ = rows(8)
    model, _ = twins(optimizer="sgd", loss="mse", mesh={"fsdp": 8})

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                self.seen = self.model.get_weights()
                raise KeyboardInterrupt

    callback = Fails()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, 2, 1, 0, [callback])
    for got, want in zip(model.get_weights(), callback.seen, strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(model.fit(x, y, 2, 1, 0).history["loss"]) == 1


def test_an_average_without_an_update_does_not_replace_the_weights():
    x, y, _ = rows(8)
    model, _ = twins(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True), loss="mse")
    model.predict(x, verbose=0)
    weights = model.get_weights()

    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, 4, 1, 0, [Fails()])
    with pytest.warns(UserWarning, match="not finite change no weights"):
        model.fit(x, np.full_like(y, np.nan), 4, 1, 0)
    for got, want in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(got, want)


def test_restored_weights_outlast_the_average_as_in_keras():
    x, y, _ = rows(8)
    ours, theirs = twins(optimizer=lambda: keras.optimizers.SGD(5.0, use_ema=True), loss="mse")
    for model in (ours, theirs):
        stopping = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
        model.fit(x, y, 8, 10, 0, [stopping], shuffle=False)
    np.testing.assert_allclose(ours.predict(x, verbose=0), theirs.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


def test_logs_are_read_only_when_somebody_looks():
    calls = []

    def compute():
        calls.append(1)
        return {"loss": 1.0}

    logs = LazyLogs(compute)
    assert not calls
    assert {**logs} == {"loss": 1.0}
    assert dict(LazyLogs(compute)) == {"loss": 1.0}
    assert LazyLogs(compute)["loss"] == 1.0
    assert list(LazyLogs(compute)) == ["loss"]
    assert bool(LazyLogs(compute))
    assert "loss" in LazyLogs(compute)
    assert LazyLogs(compute).copy() == {"loss": 1.0}
    assert len(calls) == 7


def test_the_newest_logs_do_not_wait_for_steps_in_flight():
    running = RunningLogs(lambda sums: {name: item.value() for name, item in sums.items()})
    from dew.objectives.base import Ratio

    for value in (1.0, 2.0, 6.0):
        running.add({"loss": Ratio(jnp.float32(value), jnp.float32(1))})
    assert running.newest() == {"loss": 1.0}
    assert running.values() == {"loss": 3.0}


def test_backup_and_restore_goes_on_after_a_crash(tmp_path):
    x, y, _ = rows(8)
    crash = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: 1 / (epoch - 2))

    def run(callbacks):
        model, _ = twins(optimizer="sgd", loss="mse")
        return model, lambda: model.fit(x, y, 4, 4, 0, callbacks).history["loss"]

    whole, train_whole = run([])
    want = train_whole()
    with pytest.raises(ZeroDivisionError):
        run([keras.callbacks.BackupAndRestore(str(tmp_path)), crash])[1]()
    resumed, train_resumed = run([keras.callbacks.BackupAndRestore(str(tmp_path))])
    np.testing.assert_allclose(train_resumed(), want[2:], rtol=1e-6)
    for got, expected in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_stop_evaluating_and_stop_predicting_end_their_pass_as_in_keras():
    x, y, _ = rows(12)
    found = []
    for model in twins(optimizer="sgd", loss="mse"):
        hook = keras.callbacks.LambdaCallback()
        hook.on_test_batch_end = lambda batch, logs=None, m=model: setattr(m, "stop_evaluating", batch == 1)
        hook.on_predict_batch_end = lambda batch, logs=None, m=model: setattr(m, "stop_predicting", batch == 0)
        loss = model.evaluate(x, y, 4, 0, callbacks=[hook])
        found.append((loss, model.evaluate(x[:8], y[:8], 4, 0), len(model.predict(x, 4, 0, callbacks=[hook]))))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    np.testing.assert_allclose(found[0][0], found[0][1], rtol=1e-6)
    assert found[0][2] == 4

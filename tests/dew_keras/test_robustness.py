"""No exception breaks a model: whatever verb or hook it comes from, the weights are the last good ones.

And what cannot be done is refused with its name, before anything changes.
"""

import copy
import os
import pickle
import signal
import warnings

import flax
import keras
import numpy as np
import pytest

import dew_keras
from dew_keras.interrupts import InterruptGate
from tests.dew_keras.nets import Linear, rows, twins, weights_of
from tests.tiny import tiny_batch, tiny_decoder

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

VERBS = {
    "train": lambda model, x, y, callbacks: model.fit(x, y, 4, 2, 0, callbacks, validation_data=(x, y)),
    "test": lambda model, x, y, callbacks: model.evaluate(x, y, 4, 0, callbacks=callbacks),
    "predict": lambda model, x, y, callbacks: model.predict(x, 4, 0, callbacks=callbacks),
}
HOOKS = [
    *((phase, f"on_{phase}_{at}") for phase in VERBS for at in ("begin", "batch_begin", "batch_end", "end")),
    ("train", "on_epoch_begin"),
    ("train", "on_epoch_end"),
    ("train", "on_test_batch_end"),  # inside the validation of a fit
    ("train", "set_model"),
]


@pytest.fixture(scope="module")
def model():
    return twins(optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", mesh={"data": 2, "fsdp": 4})[0]


class Fails(keras.callbacks.Callback):
    """Remembers the weights and raises, at the second call of a hook where there is one."""

    def __init__(self, hook, error):
        super().__init__()
        self.hook, self.error, self.calls, self.weights = hook, error, 0, None

        def fail(*args, **kwargs):
            self.calls += 1
            if self.calls == (2 if "batch" in hook else 1):
                self.weights = None if hook == "set_model" else self.model.get_weights()
                raise error

        setattr(self, hook, fail)


@pytest.mark.parametrize(
    "error", [RuntimeError("mine"), KeyboardInterrupt(), StopIteration("mine"), SystemExit(3)], ids=repr
)
@pytest.mark.parametrize("phase, hook", HOOKS)
def test_an_exception_in_a_hook_leaves_the_model_as_it_was_then(model, phase, hook, error):
    x, y, _ = rows(8)
    before = model.predict(x, verbose=0)
    callback = Fails(hook, error)
    with pytest.raises(type(error)) as caught:
        VERBS[phase](model, x, y, [callback])
    assert caught.value is error
    assert_same(model.get_weights(), callback.weights or model.get_weights())
    if phase != "train" or hook in ("set_model", "on_train_begin", "on_epoch_begin", "on_train_batch_begin"):
        # Nothing was trained, or one batch was.
        moved = not np.array_equal(before, model.predict(x, verbose=0))
        assert moved is (hook == "on_train_batch_begin")
    assert_agrees(model, x, y)


def assert_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def assert_agrees(model, x, y):
    """Check that predict, evaluate and fit do what the weights say."""
    kernel, bias = sorted(model.get_weights(), key=np.ndim, reverse=True)
    outputs = x @ kernel + bias
    np.testing.assert_allclose(model.predict(x, 4, 0), outputs, rtol=1e-5, atol=1e-5)
    loss = np.mean((outputs - y) ** 2)
    np.testing.assert_allclose(model.evaluate(x, y, 4, 0), loss, rtol=1e-5)
    np.testing.assert_allclose(model.fit(x, y, len(x), 1, 0).history["loss"], [loss], rtol=1e-5)


class BreaksAt:
    """A generator's batches, the third of which cannot be had."""

    def __init__(self, x, y, error):
        self.x, self.y, self.error = x, y, error

    def __iter__(self):
        for number in range(4):
            if number == 2:
                raise self.error
            yield (self.x, self.y) if self.y is not None else (self.x,)


@pytest.mark.parametrize("error", [OSError("lost"), KeyboardInterrupt()], ids=repr)
def test_data_that_fails_leaves_the_weights_of_the_batches_before(model, error):
    x, y, _ = rows(8)
    seen = []
    spy = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(model.get_weights()))
    with pytest.raises(type(error)):
        model.fit(BreaksAt(x, y, error), verbose=0, callbacks=[spy])
    assert len(seen) == 2
    assert_same(model.get_weights(), seen[-1])
    for verb in (
        lambda: model.evaluate(BreaksAt(x, y, error), verbose=0),
        lambda: model.predict(BreaksAt(x, None, error), verbose=0),
    ):
        with pytest.raises(type(error)):
            verb()
    assert_same(model.get_weights(), seen[-1])
    assert_agrees(model, x, y)


def test_a_batch_that_cannot_be_trained_changes_nothing(model):
    x, y, _ = rows(8)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"Inputs of shape \(8, 7\) do not fit Linear"):
        model.train_on_batch(np.ones((8, 7), "float32"), y)
    with pytest.raises((ValueError, TypeError)):
        model.fit(x, np.ones((8, 5, 2), "float32"), verbose=0)
    assert_same(model.get_weights(), before)
    assert_agrees(model, x, y)


def test_an_interrupt_while_a_step_replaces_the_weights_waits_for_the_step(model, monkeypatch):
    x, y, _ = rows(8)
    model.train_on_batch(x, y)
    trainer = model.trainer
    start = trainer._start

    def interrupted(*args):
        result = start(*args)  # the old weights are consumed from here, and the new ones not kept yet
        os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(trainer, "_start", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, 4, 1, 0)
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    assert_agrees(model, x, y)


def test_the_gate_lets_interrupts_through_outside_a_step():
    with InterruptGate() as gate:
        with gate.hold():
            pass
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_losses_that_are_not_finite_are_reported_and_change_nothing(model):
    x, y, _ = rows(48)
    broken = np.where(np.arange(48)[:, None] < 24, y, np.nan)
    good = model.get_weights()
    with pytest.warns(UserWarning, match="loss of epoch 1 is nan.*go.* on as in Keras") as caught:
        history = model.fit(x, np.full_like(y, np.nan), 4, 2, 0, validation_data=(x, y)).history
    assert len(caught) == 1, "once"
    assert np.isnan(history["loss"]).tolist() == [True, True]
    assert np.isfinite(history["val_loss"]).all()
    assert_same(model.get_weights(), good)
    with pytest.warns(UserWarning, match="not finite"):
        model.fit(x, broken, 4, 1, 0, shuffle=False)
    assert not np.array_equal(model.get_weights()[1], good[1]), "the first half trained"
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert np.isnan(model.train_on_batch(x, broken))
    assert_agrees(model, x, y)


@pytest.mark.parametrize("raise_error", [False, True])
def test_terminate_on_nan_stops_the_fit(model, raise_error):
    x, y, _ = rows(16)
    callback = keras.callbacks.TerminateOnNaN(raise_error=raise_error)
    broken = np.where(np.arange(16)[:, None] < 8, y, np.nan)
    ended = []
    spy = keras.callbacks.LambdaCallback(on_train_end=lambda logs: ended.append(logs))
    if raise_error:
        with pytest.raises(RuntimeError, match="NaN or Inf loss encountered at batch 2"):
            model.fit(x, broken, 4, 3, 0, [callback, spy], shuffle=False)
    else:
        assert len(model.fit(x, broken, 4, 3, 0, [callback, spy], shuffle=False).history["loss"]) == 1
    assert bool(ended) is not raise_error
    assert_agrees(model, x, y)


REFUSED = {
    "callbacks=[3]": (TypeError, "callbacks must be .* Received: 3 of type int"),
    "callbacks=[keras.callbacks.EarlyStopping]": (TypeError, "made as in EarlyStopping()"),
    "epochs=1.5": (ValueError, "epochs must be 0 or a positive integer. Received: epochs=1.5"),
    "epochs=-1": (ValueError, "epochs must be 0 or a positive integer. Received: epochs=-1"),
    "epochs=True": (ValueError, "epochs must be"),
    "initial_epoch=-1": (ValueError, "initial_epoch must be 0 or a positive integer"),
    "verbose='yes'": (ValueError, "verbose must be .* Received: verbose='yes'"),
    "verbose=-1": (ValueError, "verbose must be"),
    "validation_split=1.0": (ValueError, "validation_split must be .*=1.0"),
    "validation_split=-0.1": (ValueError, "validation_split must be"),
    "validation_split='a'": (ValueError, "validation_split must be"),
    "validation_freq=0": (ValueError, "validation_freq. must be"),
    "validation_freq=(1, 2)": (ValueError, "validation_freq. must be"),
    "batch_size=0": (ValueError, "batch_size must be a positive integer"),
    "batch_size=2.5": (ValueError, "batch_size must be"),
    "steps_per_epoch=0": (ValueError, "steps_per_epoch must be"),
    "validation_steps=0": (ValueError, "validation_steps must be"),
    "validation_batch_size=0": (ValueError, "validation_batch_size must be"),
    "workers=2": (TypeError, "unexpected keyword argument 'workers'"),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_a_bad_argument_of_fit_is_named_before_anything_changes(model, argument):
    x, y, _ = rows(8)
    error, match = REFUSED[argument]
    before, history = model.get_weights(), model.history
    taken = []

    def batches():
        taken.append(1)
        yield x, y

    data = (batches(),) if "split" not in argument and "batch_size" not in argument else (x, y)
    with pytest.raises(error, match=match):
        model.fit(*data, **{"verbose": 0} | eval(f"dict({argument})"))
    assert not taken
    assert_same(model.get_weights(), before)
    assert model.history is history


def test_other_bad_arguments_are_named(model):
    x, y, _ = rows(8)
    empty = np.zeros((0, 4), "float32")
    for verb, error, match in (
        (lambda: model.set_weights(5), TypeError, "needs a list of arrays.*weights=5 of type int"),
        (lambda: model.set_weights("ab"), TypeError, "needs a list of arrays"),
        (lambda: model.set_weights([]), ValueError, "needs 2 arrays. Received: 0"),
        (lambda: model.set_weights([np.zeros(2), np.zeros(3)]), ValueError, "must have shape"),
        (lambda: model.fit(empty, empty, verbose=0), ValueError, "no rows"),
        (lambda: model.evaluate(empty, empty, verbose=0), ValueError, "no rows"),
        (lambda: model.predict(empty, verbose=0), ValueError, "no rows"),
        (lambda: model.evaluate(x, y, verbose="loud"), ValueError, "verbose must be"),
        (lambda: model.predict(x, verbose=None), ValueError, "verbose must be"),
        (lambda: model.evaluate(x, y, callbacks="stop"), TypeError, "callbacks must be"),
        (lambda: model.predict(x, callbacks=[[None, 1]]), TypeError, "callbacks must be"),
        (lambda: model.evaluate(x, y, steps=0), ValueError, "steps must be"),
        (lambda: model.predict(x, batch_size=0), ValueError, "batch_size must be"),
        (lambda: model.evaluate(x, y, workers=2), TypeError, "workers"),
    ):
        with pytest.raises(error, match=match):
            verb()
    assert_agrees(model, x, y)


def test_compile_refuses_rows_that_the_model_cannot_read_and_stays_compiled():
    model = dew_keras.Model(tiny_decoder(num_layers=1))
    model.compile("sgd", sequence_length=16)
    optimizer = model.optimizer
    for arguments, match in (
        ({"sequence_length": 65}, "at most 64 positions.*sequence_length=65"),
        ({"packing": "yes"}, "packing must be True or False. Received: packing='yes'"),
    ):
        with pytest.raises(ValueError, match=match):
            model.compile("adam", **arguments)
        assert model.optimizer is optimizer


def test_a_language_model_survives_its_hooks_and_generates_in_them():
    model = dew_keras.Model(tiny_decoder(num_layers=1))
    model.compile("sgd", mesh={"fsdp": 8})
    tokens = tiny_batch()["tokens"]
    said = []

    class Samples(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            said.append(self.model.generate([1, 2, 3], max_new_tokens=4, stop_token_ids=[]))
            said.append(self.model.predict(tokens[:, :-1], verbose=0))
            if epoch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(tokens, batch_size=8, epochs=3, verbose=0, callbacks=[Samples()])
    assert model.generate([1, 2, 3], max_new_tokens=4, stop_token_ids=[]) == said[2]
    np.testing.assert_array_equal(model.predict(tokens[:, :-1], verbose=0), said[3])
    assert not np.array_equal(said[1], said[3])


def test_validation_data_comes_before_a_split():
    x, y, _ = rows(8)
    ours, theirs = twins(optimizer="sgd", loss="mse")
    got, want = (
        m.fit(x, y, 4, 1, 0, validation_split=0.5, validation_data=(x, y), shuffle=False) for m in (ours, theirs)
    )
    assert got.params["steps"] == want.params["steps"] == 2
    np.testing.assert_allclose(got.history["loss"], want.history["loss"], rtol=1e-5)


def test_a_fit_inside_a_hook_is_refused_and_the_outer_one_goes_on():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("sgd", "mse")

    class Nested(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for verb in (lambda: self.model.fit(x, y, verbose=0), lambda: self.model.train_on_batch(x, y)):
                with pytest.raises(RuntimeError, match="another fit of this model runs"):
                    verb()

    assert len(model.fit(x, y, 4, 2, 0, [Nested()]).history["loss"]) == 2
    assert_agrees(model, x, y)


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_compile_and_close_inside_a_hook_of_a_verb_are_refused_and_the_verb_goes_on(verb):
    x, y, _ = rows(16)
    model = dew_keras.Model(Linear())
    model.compile("sgd", "mse")
    want = model.evaluate(x, y, verbose=0)
    seen = []

    class Meddles(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            for change in (lambda: self.model.compile("adam", "mae"), self.model.close):
                with pytest.raises(RuntimeError, match=f"cannot be called from a callback while {verb} runs"):
                    change()
            seen.append(batch)

        on_predict_batch_end = on_test_batch_end

    data = (x, y) if verb == "evaluate" else (x,)
    getattr(model, verb)(*data, batch_size=8, verbose=0, callbacks=[Meddles()])
    assert seen == [0, 1]
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), want, rtol=1e-6)
    model.compile("adam", "mae")
    model.close()


def test_no_epochs_give_an_empty_history_as_in_keras():
    x, y, _ = rows(8)
    for model in twins(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True), loss="mse"):
        calls = []
        hook = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs, calls=calls: calls.append("begin"),
            on_train_end=lambda logs, calls=calls: calls.append(logs),
        )
        before = weights_of(model)
        history = model.fit(x, y, 4, 0, 0, [hook], validation_data=(x, y))
        assert (history.history, history.epoch, calls) == ({}, [], ["begin", {}])
        for got, want in zip(weights_of(model), before, strict=True):
            np.testing.assert_array_equal(got, want)


def test_keras_config_caps_epochs_and_steps_as_in_keras():
    x, y, _ = rows(24)
    found = []
    for model in twins(optimizer="sgd", loss="mse"):
        keras.config.set_max_epochs(2)
        keras.config.set_max_steps_per_epoch(2)
        try:
            steps = []
            hook = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, s=steps: s.append(batch))
            hook.on_test_batch_end = hook.on_predict_batch_end = hook.on_train_batch_end
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                model.fit(x, y, 4, 5, 0, [hook], shuffle=False, validation_data=(x, y))
                model.evaluate(x, y, 4, 0, callbacks=[hook])
                rows_given = len(model.predict(x, 4, 0, callbacks=[hook]))
            words = {str(w.message).split(",")[0] for w in warned if "Limiting" in str(w.message)}
            found.append((steps, rows_given, words))
            model.fit(x, y, 4, 1, 0, steps_per_epoch=1)  # below both: no warning
            model.test_on_batch(x, y)
        finally:
            keras.config.set_max_epochs(None)
            keras.config.set_max_steps_per_epoch(None)
    assert found[0] == found[1]
    assert found[0][1:] == (8, {"Limiting epochs to 2", "Limiting steps_per_epoch to 2"})


def test_a_deep_copy_trains_on_alone_with_the_optimizer_as_it_was():
    x, y, _ = rows(16)
    model = dew_keras.Model(Linear())
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae", keras.metrics.MeanSquaredError()])
    model.fit(x, y, 8, verbose=0)
    model.optimizer.learning_rate = 0.01
    twin = copy.deepcopy(model)
    assert twin.optimizer is not model.optimizer
    assert int(twin.optimizer.iterations) == 2
    before = model.get_weights()
    got = twin.fit(x, y, 8, 2, 0, shuffle=False).history
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    want = model.fit(x, y, 8, 2, 0, shuffle=False).history
    assert got == want
    with pytest.raises(TypeError, match=r"save\('name\.keras'\)"):
        pickle.dumps(model)
    bare = copy.deepcopy(dew_keras.Model(Linear(), name="bare"))
    assert (bare.name, bare.compiled, bare.built) == ("bare", False, False)
    assert bare.predict(x, verbose=0).shape == (16, 3)
    bare.close()
    with pytest.raises(RuntimeError, match="freed the weights"):
        copy.deepcopy(bare)


class Doubled(flax.linen.Module):
    """No parameters."""

    @flax.linen.compact
    def __call__(self, x):
        """Double three columns."""
        return 2 * x[:, :3]


def test_a_module_without_parameters_goes_through_every_verb(tmp_path):
    x, y, _ = rows(10)
    model = dew_keras.Model(Doubled())
    model.compile("adam", "mse", mesh={"fsdp": 8})
    want = np.mean((2 * x[:, :3] - y) ** 2)
    found = [*model.fit(x, y, 4, verbose=0).history["loss"], model.evaluate(x, y, verbose=0)]
    found += [model.train_on_batch(x, y), model.test_on_batch(x, y)]
    model.set_weights(model.get_weights())
    model.summary(print_fn=lambda text: None)
    model.save_weights(tmp_path / "a.weights.h5")
    model.load_weights(tmp_path / "a.weights.h5")
    model.save(tmp_path / "m.keras")
    again = dew_keras.load_model(tmp_path / "m.keras", {"Doubled": Doubled})
    found += [again.evaluate(x, y, verbose=0), copy.deepcopy(model).evaluate(x, y, verbose=0)]
    np.testing.assert_allclose(found, want, rtol=1e-5)
    np.testing.assert_array_equal(again.predict(x, verbose=0), 2 * x[:, :3])

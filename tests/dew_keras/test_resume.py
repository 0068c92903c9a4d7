"""Stopped and continued from a file equals never stopped: losses, logs, weights, in the middle of an epoch too."""

import functools
import os
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

import dew_keras
from dew.objectives.base import Ratio
from dew_keras.callbacks import RunningLogs
from tests.dew_keras.nets import Linear, Regularised, rows

# Keras' own callbacks read its variables in a way that NumPy 2 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROOT = pathlib.Path(__file__).resolve().parents[2]
COUNT, BATCH = 22, 4  # 6 batches an epoch, the last one short: windows of 4 batches lie across epochs
X, _, _ = rows(COUNT)
Y = np.eye(3, dtype="float32")[np.arange(COUNT) % 3]
MESH = {"data": 2, "fsdp": 4}


def build(mesh=MESH, accumulation=4, seed=3, **arguments):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 1, 0.9)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    settings = {
        "optimizer": keras.optimizers.Adam(schedule),
        "loss": loss,
        "metrics": ["mae", keras.metrics.AUC(name="auc")],
    }
    model = dew_keras.Model(Regularised(), seed=seed)
    model.compile(**settings | {"mesh": mesh, "accumulation": accumulation} | arguments)
    return model


class Spy(keras.callbacks.Callback):
    """Writes down the logs of every batch, and fails where it is told to."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.logs, self.fail_at, self.epoch = {}, fail_at, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.logs[self.epoch, batch] = dict(logs)
        if (self.epoch, batch) == self.fail_at:
            raise ZeroDivisionError


def arrays():
    return {"x": X, "y": Y, "batch_size": BATCH}


def train(model, callbacks=(), epochs=3, **data):
    spy = next((c for c in callbacks if isinstance(c, Spy)), Spy())
    history = model.fit(
        **(data or arrays()), epochs=epochs, verbose=0, callbacks=[*callbacks, spy][: 1 + len(callbacks)]
    )
    return history.history, spy.logs, model.get_weights()


@functools.cache
def uninterrupted():
    return train(build())


def assert_goes_on(got, want, first, exact=True):
    """Compare what came after the epoch and batch `first` with the run that was not stopped."""
    history, logs, weights = got
    close = (
        np.testing.assert_array_equal if exact else functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    )
    assert list(logs) == [place for place in want[1] if place >= first]
    for place, values in logs.items():
        assert values.keys() == want[1][place].keys()
        for name, value in values.items():
            close(value, want[1][place][name], err_msg=f"{name} at {place}")
    for name, values in history.items():
        close(values, want[0][name][first[0] :], err_msg=name)
    for mine, expected in zip(weights, want[2], strict=True):
        close(mine, expected)


@pytest.mark.parametrize(
    "save_freq, fail_at, mesh",
    [
        (4, (1, 3), MESH),  # saved after 8 batches: in epoch 1 after 2, between windows
        (5, (1, 4), MESH),  # after 10: two batches of a window are in
        (6, (1, 2), MESH),  # after the last batch of an epoch
        (5, (1, 4), {"fsdp": 8}),
        ("epoch", (2, 0), MESH),
    ],
)
def test_backup_and_restore_resumes_exactly(tmp_path, save_freq, fail_at, mesh):
    with pytest.raises(ZeroDivisionError):
        train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), save_freq), Spy(fail_at)])
    got = train(build(mesh, seed=8), [keras.callbacks.BackupAndRestore(str(tmp_path), save_freq), Spy()])
    done = {4: (1, 2), 5: (1, 4), 6: (0, 6), "epoch": (2, 0)}[save_freq]
    assert_goes_on(got, uninterrupted(), done, exact=mesh == MESH)
    assert not list(tmp_path.glob("*"))


KILLED = """
import sys, os, signal, keras
from tests.dew_keras.test_resume import build, train, Spy
class Kill(keras.callbacks.Callback):
    epoch = 0
    def on_epoch_end(self, epoch, logs=None):
        self.epoch = epoch + 1
    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
train(build(), [keras.callbacks.BackupAndRestore(sys.argv[1], 2), Kill()])
"""


def test_a_killed_process_is_gone_on_with_by_another(tmp_path):
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    got = train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 2), Spy()])
    assert_goes_on(got, uninterrupted(), (1, 4))


def test_it_resumes_again_after_a_second_crash(tmp_path):
    # Keras writes epoch 0 into its own metadata after a resume; the weights file knows better.
    for fail_at in ((1, 1), (1, 5)):
        with pytest.raises(ZeroDivisionError):
            train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy(fail_at)])
    got = train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy()])
    assert_goes_on(got, uninterrupted(), (1, 6))


def test_a_damaged_backup_falls_back_to_the_one_before(tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1, double_checkpoint=True), Spy((1, 3))])
    latest = tmp_path / "latest.weights.h5"
    latest.write_bytes(latest.read_bytes()[:3000])
    got = train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy()])
    assert_goes_on(got, uninterrupted(), (1, 3))


def test_a_fit_of_other_batches_is_refused(tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy((1, 3))])
    with pytest.raises(ValueError, match=r"epoch 2 after batch 4 of a fit with batch_size=4 \(now 2\)"):
        train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1)], x=X, y=Y, batch_size=2)


def test_saved_between_fits_and_loaded_goes_on(tmp_path):
    path = tmp_path / "a.weights.h5"
    model = build()
    train(model, epochs=2)
    model.save_weights(path)
    early = build(seed=8)  # the file's seed and key count
    early.load_weights(path)  # before weights, masters and moments exist
    late = build()
    late.fit(X, Y, BATCH, 1, 0)  # all of it exists
    late.load_weights(path)
    late.save_weights(tmp_path / "b.weights.h5")
    again = dew_keras.Model(Regularised(), seed=8)
    again.load_weights(tmp_path / "b.weights.h5")  # before compile
    again.compile(**build()._engine.compiled.arguments)
    for other in (early, late, again):
        assert int(other.optimizer.iterations) in (3, 0)
        got = train(other, [Spy()], initial_epoch=2, **arrays())
        assert_goes_on(got, uninterrupted(), (2, 0))


def test_a_checkpoint_inside_an_epoch_is_gone_on_with_by_the_fit_of_that_epoch(tmp_path):
    path = str(tmp_path / "{epoch}-{batch}.weights.h5")
    checkpoints = [keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=4)]
    checkpoints.append(keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}-{batch}.keras"), save_freq=4))
    train(build(), checkpoints, epochs=2)
    model = dew_keras.load_model(tmp_path / "2-2.keras", {"Regularised": Regularised}, compile=False)
    model.compile(**build()._engine.compiled.arguments)
    assert_goes_on(train(model, [Spy()], initial_epoch=1, **arrays()), uninterrupted(), (1, 2))
    model = build()
    model.load_weights(tmp_path / "2-2.weights.h5")
    with pytest.raises(ValueError):  # a fit of data that is refused leaves the place to the next one
        model.fit(X, np.ones((COUNT, 5, 2), "float32"), BATCH, 3, 0, initial_epoch=1)
    assert_goes_on(train(model, [Spy()], initial_epoch=1, **arrays()), uninterrupted(), (1, 2))
    model = build()
    model.load_weights(tmp_path / "2-2.weights.h5")
    assert len(train(model, [Spy()], epochs=1)[1]) == 6  # another epoch: all of its batches


def test_a_rate_that_a_callback_set_is_restored(tmp_path):
    x, y, _ = rows(8)

    def run(fail_at):
        model = dew_keras.Model(Linear(), seed=1)
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse")
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch < 2 else rate)
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "run"))
        return train(model, [backup, halve, Spy(fail_at)], x=x, y=y, batch_size=4, epochs=4)

    want = run(None)
    with pytest.raises(ZeroDivisionError):
        run((2, 1))
    assert_goes_on(run(None), want, (2, 0))


class Numbers(keras.utils.PyDataset):
    """Batches that its own hook orders anew every epoch; notes which were made."""

    def __init__(self):
        super().__init__()
        self.index, self.random, self.made = np.arange(COUNT), np.random.default_rng(0), []

    @property
    def num_batches(self):
        return 5

    def __getitem__(self, number):
        self.made.append(number)
        chosen = self.index[number * 4 : number * 4 + 4]
        return X[chosen], Y[chosen]

    def on_epoch_end(self):
        self.random.shuffle(self.index)


def stream():
    while True:
        for start in range(0, COUNT, BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]


SOURCES = {
    "arrays, cut": lambda: {**arrays(), "steps_per_epoch": 4},
    "dataset": lambda: {"x": Numbers()},
    "dataset, cut": lambda: {"x": Numbers(), "steps_per_epoch": 3},
    "generator": lambda: {"x": stream(), "steps_per_epoch": 4},
    "list of batches": lambda: {"x": type("Batches", (), {"__iter__": lambda self: iter([*_six()])})()},
}


def _six():
    numbers = stream()
    return [next(numbers) for _ in range(6)]


class OwnStep(dew_keras.Model):
    """Keeps a metric of its own, which Keras hands on from batch to batch."""

    def train_step(self, state, data):
        """Train on a batch as the base class does."""
        return super().train_step(state, data)


class Largest(keras.metrics.Metric):
    """No sum: it is fed the rows on the host."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.abs(y_pred))))

    def result(self):
        return keras.ops.convert_to_tensor(self.value)


@pytest.mark.parametrize("kind, per_execution", [(dew_keras.Model, 3), (OwnStep, 1)])
def test_other_forms_of_steps_resume_exactly(tmp_path, kind, per_execution):
    data = {"x": np.tile(X, (3, 1))[:64], "y": np.tile(Y, (3, 1))[:64], "batch_size": 8}

    def model():
        made = kind(Linear(), seed=2)
        made.compile(
            keras.optimizers.Adam(0.02), "mse", metrics=["mae", Largest()], steps_per_execution=per_execution, mesh=MESH
        )
        return made

    want = train(model(), [Spy()], epochs=2, **data)
    last = {3: (1, 5), 1: (1, 6)}[per_execution]
    with pytest.raises(ZeroDivisionError):
        train(model(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy(last)], epochs=2, **data)
    got = train(model(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy()], epochs=2, **data)
    assert_goes_on(got, want, (1, last[1] + 1))


def test_metrics_that_keras_numbers_anew_keep_their_sums():
    running = RunningLogs(lambda sums: {name: item.value() for name, item in sums.items()})
    running.start_with({"auc_3": Ratio(np.float64(6), np.float64(2)), "loss": Ratio(np.float64(1), np.float64(2))})
    running.add({"auc_7": Ratio(np.float32(2), np.float32(2)), "loss": Ratio(np.float32(1), np.float32(2))})
    assert running.values() == {"auc_7": 2.0, "loss": 0.5}
    running.start_with({"other": Ratio(np.float64(6), np.float64(2))})
    with pytest.raises(ValueError, match=r"begun with the logs \['other'\]; this model reports \['loss'\]"):
        running.add({"loss": Ratio(np.float32(1), np.float32(2))})


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_data_goes_on_with_its_next_batch(tmp_path, kind):
    want = train(build(), **SOURCES[kind]())
    with pytest.raises(ZeroDivisionError):
        train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy((1, 2))], **SOURCES[kind]())
    loaded = build(seed=8)
    loaded.load_weights(tmp_path / "latest.weights.h5")
    assert_goes_on(train(loaded, [Spy()], initial_epoch=1, **SOURCES[kind]()), want, (1, 3))
    data = SOURCES[kind]()
    got = train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy()], **data)
    assert_goes_on(got, want, (1, 3))
    if kind == "dataset":
        made = data["x"].made  # one that shows the shapes, two that were left of the epoch, and an epoch
        assert len(made) == 8
        assert sorted(made[3:]) == [0, 1, 2, 3, 4]


def test_a_dataset_goes_on_in_its_first_epoch_without_making_what_was_read(tmp_path):
    want = train(build(), epochs=2, x=Numbers())
    with pytest.raises(ZeroDivisionError):
        train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy((0, 2))], x=Numbers())
    data = Numbers()
    got = train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy()], epochs=2, x=data)
    assert_goes_on(got, want, (0, 3))
    assert len(data.made) == 8
    assert sorted(data.made[3:]) == [0, 1, 2, 3, 4]
    assert len(set(data.made[:3])) == 3


def test_a_begun_generator_cannot_go_back_and_says_so(tmp_path):
    numbers = stream()
    with pytest.raises(ZeroDivisionError):
        train(
            build(),
            [keras.callbacks.BackupAndRestore(str(tmp_path), 1), Spy((0, 2))],
            x=numbers,
            steps_per_epoch=4,
        )
    with pytest.warns(UserWarning, match="Make the generator anew"):
        train(build(), [keras.callbacks.BackupAndRestore(str(tmp_path), 1)], x=numbers, steps_per_epoch=4, epochs=1)

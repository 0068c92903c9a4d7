"""Every class of keras.callbacks does on a sharded model what it does on keras.Model."""

import copy
import csv
import json
import pickle
import re
from unittest import mock

import jax
import keras
import numpy as np
import pytest

import dew_keras
from dew_keras.callbacks import LazyLogs, RunningLogs
from dew_keras.snapshots import WeightSnapshot
from tests.dew_keras.nets import Linear, rows, twins
from tests.tiny import tiny_batch, tiny_decoder

SPLIT_ALL = dew_keras.Layout(min_shard=512, tolerance=0)
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def assert_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# Early stopping ----------------------------------------------------------------------------------


class Stopping(keras.callbacks.EarlyStopping):
    """Looks at what it holds, as a subclass of a user may."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.held = getattr(self, "held", [])
        self.held.append(self.best_weights)


def test_early_stopping_holds_the_best_weights_as_they_lie_on_the_devices():
    x, y, _ = rows(8, width=64, classes=64)
    model = dew_keras.Model(Linear(64))
    model.compile(keras.optimizers.SGD(0.5), "mse", mesh={"fsdp": 8}, layout=SPLIT_ALL)
    stopping = Stopping("worse", mode="min", patience=2, restore_best_weights=True)
    weights, places = [], []

    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["worse"] = [3.0, 1.0, 2.0, 4.0, 0.0][epoch]
            weights.append(self.model.get_weights())
            places.append(jax.tree.map(lambda leaf: leaf.sharding, self.model.variables))

    history = model.fit(x, y, 8, 5, 0, [Worse(), stopping])
    assert history.history["worse"] == [3.0, 1.0, 2.0, 4.0]
    snapshot = stopping.held[-1]
    assert isinstance(snapshot, WeightSnapshot)
    assert snapshot is stopping.held[1]
    assert not snapshot.is_on_host, "restoring read nothing"
    assert jax.tree.map(lambda leaf: leaf.sharding, snapshot.variables) == places[1]
    kernel = snapshot.variables["params"]["dense"]["kernel"]
    assert {shard.data.nbytes for shard in kernel.addressable_shards} == {kernel.nbytes // 8}, (
        "each device keeps a part"
    )
    assert_same(model.get_weights(), weights[1])
    # Training consumes none of it: it can be restored again, here and elsewhere, and reads as a list.
    model.fit(x, y, 8, 1, 0)
    model.set_weights(snapshot)
    assert_same(model.get_weights(), weights[1])
    assert not snapshot.is_on_host
    assert len(snapshot) == len(weights[1])
    assert_same(snapshot, weights[1])
    assert snapshot.is_on_host
    other = dew_keras.Model(Linear(64))
    other.build(x)
    other.set_weights(snapshot)
    assert_same(other.get_weights(), weights[1])


def test_a_snapshot_of_another_module_is_refused():
    x, y, _ = rows(8)
    stopping = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    model, _ = twins(optimizer="sgd", loss="mse")
    model.fit(x, y, 8, 1, 0, [stopping])
    other = dew_keras.Model(Linear(2))
    other.build(x)
    with pytest.raises(ValueError, match=r"must have shape \(2,\)"):
        other.set_weights(stopping.best_weights)


@pytest.mark.parametrize("monitor, better", [("val_perplexity", "less"), ("val_token_accuracy", "greater")])
def test_auto_mode_knows_the_direction_of_a_language_models_metrics(monitor, better):
    model = dew_keras.Model(tiny_decoder(num_layers=1))
    model.compile("sgd")
    callback = keras.callbacks.EarlyStopping(monitor)
    callback.set_model(model)
    callback._set_monitor_op()
    assert callback.monitor_op is getattr(keras.ops, better)


def test_auto_mode_knows_the_direction_of_keras_metrics():
    x, y, _ = rows(8)
    for metrics, monitor, better in ((["mae"], "val_mae", "less"), (["accuracy"], "accuracy", "greater")):
        ours, theirs = twins(optimizer="sgd", loss="mse", metrics=metrics)
        for model in (ours, theirs):
            callback = keras.callbacks.EarlyStopping(monitor)
            model.fit(x, y, verbose=0, callbacks=[callback], validation_data=(x, y))
            assert callback.monitor_op is getattr(keras.ops, better)


# Callbacks that write or decide --------------------------------------------------------------------


def test_orbax_checkpoints_are_saved_sharded_and_read_onto_another_mesh(tmp_path):
    model = dew_keras.Model(tiny_decoder(num_layers=2))
    model.compile("adam", mesh={"fsdp": 4, "tensor": 2}, layout=SPLIT_ALL)
    tokens = tiny_batch()["tokens"]
    other = dew_keras.Model(tiny_decoder(num_layers=2), seed=1)
    other.compile("sgd", mesh={"fsdp": 8}, layout=SPLIT_ALL)
    weights = []
    spy = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(model.get_weights()))
    for weights_only in (True, False):
        folder = tmp_path / str(weights_only)
        saving = keras.callbacks.OrbaxCheckpoint(str(folder), save_weights_only=weights_only, max_to_keep=2)
        model.fit(tokens, batch_size=8, epochs=2, verbose=0, callbacks=[spy, saving])
        assert sorted(child.name for child in folder.iterdir()) == ["0", "1"]
        other.load_weights(folder)
        assert_same(other.get_weights(), weights[-1])
        assert not other.variables["params"]["embed_tokens"]["embedding"].sharding.is_fully_replicated
        other.load_weights(folder / "0")
        assert_same(other.get_weights(), weights[-2])
    small = dew_keras.Model(tiny_decoder(num_layers=1))
    with pytest.raises(ValueError, match="does not hold this module's weights: they differ at"):
        small.load_weights(folder)
    with pytest.raises(FileNotFoundError, match="holds no step"):
        small.load_weights(tmp_path)
    with pytest.raises(ValueError, match="value_format must be"):
        small.get_state_tree("list")


def test_checkpoints_loggers_and_schedules_see_the_logs_of_keras(tmp_path):
    x, y, _ = rows(16)
    runs = []
    for model, folder in zip(twins(optimizer="sgd", loss="mse"), (tmp_path / "ours", tmp_path / "theirs"), strict=True):
        folder.mkdir()
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else 40.0),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_lr=1e-3, cooldown=1),
            keras.callbacks.ModelCheckpoint(
                str(folder / "{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=3, monitor="loss"
            ),
            keras.callbacks.ModelCheckpoint(
                str(folder / "best.weights.h5"), save_weights_only=True, save_best_only=True, monitor="val_loss"
            ),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
        ]
        model.fit(x, y, 4, 3, 0, callbacks, validation_data=(x, y), shuffle=False)
        table = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
        last, rate = model.get_weights(), float(model.optimizer.learning_rate)
        model.load_weights(folder / "best.weights.h5")
        files = sorted(path.name for path in folder.iterdir())
        runs.append((files, table, last, model.get_weights(), rate))
    ours, theirs = runs
    assert ours[0] == theirs[0]
    assert [list(row) for row in ours[1]] == [list(row) for row in theirs[1]]
    for got, want in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(
            [float(value) for value in got.values()], [float(value) for value in want.values()], rtol=1e-4
        )
    assert ours[4] == pytest.approx(theirs[4])
    for got, want in zip((*ours[2], *ours[3]), (*reversed(theirs[2]), *reversed(theirs[3])), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3)


def test_remote_monitor_sends_the_logs():
    x, y, _ = rows(8)
    model, _ = twins(optimizer="sgd", loss="mse")
    with mock.patch("requests.post") as post:
        monitor = keras.callbacks.RemoteMonitor(send_as_json=True)
        history = model.fit(x, y, 4, 2, 0, [monitor]).history
    sent = [call.kwargs["json"] for call in post.call_args_list]
    assert sent == [{"epoch": epoch, "loss": history["loss"][epoch]} for epoch in range(2)]


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_test_end"])
def test_weights_and_rate_assigned_in_any_hook_are_those_of_the_next_step(hook):
    x, y, _ = rows(8)
    trained = []
    for model in twins(optimizer=lambda: keras.optimizers.SGD(0.1), loss="mse"):
        done = []

        def assign(*args, model=model, done=done, **kwargs):
            if not done:
                done.append(1)
                model.set_weights([np.full_like(weight, 0.5) for weight in model.get_weights()])
                model.optimizer.learning_rate = 0.25

        callback = keras.callbacks.Callback()
        setattr(callback, hook, assign)
        model.fit(x, y, 4, 2, 0, [callback], validation_data=(x, y), shuffle=False)
        assert done
        trained.append(sorted(model.get_weights(), key=np.ndim))
    for got, want in zip(*trained, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# Logs ----------------------------------------------------------------------------------------------

NUMBERS = {"loss": 1.0, "mae": 2.0}
FORMS = {
    "dict": dict,
    "keywords": lambda logs: (lambda **found: found)(**logs),
    "display": lambda logs: {**logs},
    "format": lambda logs: dict(zip(("loss", "mae"), map(float, "{loss} {mae}".format(**logs).split()), strict=True)),
    "format_map": lambda logs: dict(
        zip(("loss", "mae"), map(float, "{loss} {mae}".format_map(logs).split()), strict=True)
    ),
    "json": lambda logs: json.loads(json.dumps(logs)),
    "json indented": lambda logs: json.loads(json.dumps(logs, indent=1)),
    "json inside": lambda logs: json.loads(json.dumps({"logs": logs}))["logs"],
    "copy": lambda logs: logs.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda logs: pickle.loads(pickle.dumps(logs)),
    "or": lambda logs: logs | {},
    "ror": lambda logs: {} | logs,
    "ior": lambda logs: logs.__ior__({}),
    "update": lambda logs: (found := {}, found.update(logs))[0],
    "items": lambda logs: dict(logs.items()),
    "zip": lambda logs: dict(zip(logs.keys(), logs.values(), strict=True)),
    "reversed": lambda logs: {name: NUMBERS[name] for name in reversed(list(reversed(logs)))},
    "get": lambda logs: {name: logs.get(name) for name in NUMBERS},
    "index": lambda logs: {name: logs[name] for name in NUMBERS},
    "iterate": lambda logs: {name: NUMBERS[name] for name in logs},
    "repr": lambda logs: eval(repr(logs)),
    "str": lambda logs: eval(f"{logs}"),
    "popitem": lambda logs: dict(reversed([logs.popitem(), logs.popitem()])),
    "pop": lambda logs: {name: logs.pop(name) for name in NUMBERS},
    "setdefault": lambda logs: {name: logs.setdefault(name, 9.0) for name in NUMBERS},
    "match": lambda logs: next(({"loss": a, "mae": b} for a, b in [_matched(logs)])),
}


def _matched(logs):
    match logs:
        case {"loss": loss, "mae": mae}:
            return loss, mae
    return None, None


@pytest.mark.parametrize("form", FORMS)
def test_unread_logs_read_as_a_dict_in_every_form(form):
    calls = []
    logs = LazyLogs(lambda: calls.append(1) or dict(NUMBERS))
    assert isinstance(logs, dict)
    assert not calls
    found = FORMS[form](logs)
    assert found == NUMBERS
    assert list(found) == list(NUMBERS)
    assert len(calls) == 1


def test_unread_logs_compare_count_and_change_as_a_dict():
    def logs():
        return LazyLogs(lambda: dict(NUMBERS))

    assert logs() == NUMBERS
    assert logs() == logs()
    assert logs() == NUMBERS
    assert logs() != {"loss": 1.0}
    assert len(logs()) == 2
    assert logs()
    assert not LazyLogs(dict)
    assert "loss" in logs()
    assert "not computed yet" not in logs()
    changed = logs()
    changed["mine"] = 3.0
    del changed["loss"]
    changed |= {"more": 4.0}
    assert changed == {"mae": 2.0, "mine": 3.0, "more": 4.0}
    cleared = logs()
    cleared.clear()
    assert cleared == {}


def test_logs_that_are_kept_say_what_they_said_then():
    class Late(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.kept, self.read = [], []

        def on_train_batch_end(self, batch, logs=None):
            self.kept.append(logs)

    class Read(Late):
        def on_train_batch_end(self, batch, logs=None):
            self.kept.append(dict(logs))

    x, y, _ = rows(16)
    runs = []
    for callback in (Late(), Read()):
        model, _ = twins(optimizer="sgd", loss="mse")
        model.fit(x, y, 2, 1, 0, [callback], shuffle=False)
        runs.append([entry["loss"] for entry in callback.kept])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 8


@pytest.mark.parametrize("verbose", [0, 1])
def test_without_a_reader_of_logs_no_step_waits_the_bar_included(monkeypatch, verbose):
    x, y, _ = rows(16)
    model, _ = twins(optimizer="sgd", loss="mse")
    waited = []
    values = RunningLogs.values
    monkeypatch.setattr(RunningLogs, "values", lambda self: waited.append(1) or values(self))
    counted = []
    spy = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: counted.append(batch))
    model.fit(x, y, 2, 1, verbose, [spy])
    assert len(counted) == 8
    assert len(waited) == 1, "the epoch's own"


# Text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [0, 1, 2, "auto", True, 3])
@pytest.mark.parametrize("scale", [1.0, 2.0**-14])
def test_text_has_the_digits_of_keras_for_the_same_numbers(verbose, scale, capsys):
    # Whole numbers and a rate of zero: both sides compute the same floats, to the last bit.
    x = np.eye(4, dtype="float32")[[0, 1, 2, 3] * 2]
    y = (np.arange(24).reshape(8, 3) % 7).astype("float32") * scale
    texts = []
    for model in twins(optimizer=lambda: keras.optimizers.SGD(0.0), loss="mae", metrics=["mse"]):
        model.build(x if isinstance(model, dew_keras.Model) else None)
        model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
        text = []
        for verb in (
            lambda model=model: model.fit(x, y, 4, 2, verbose, validation_data=(x, y), shuffle=False),
            lambda model=model: model.evaluate(x, y, 4, verbose),
            lambda model=model: model.predict(x, 4, verbose),
        ):
            verb()
            text.extend(finished_lines(capsys.readouterr().out))
        texts.append(text)
    assert texts[0] == texts[1]
    assert bool(texts[0]) is bool(verbose)


def finished_lines(text):
    """Keep headers and the last state of each bar, without times: how often a bar is drawn depends on the clock."""
    found = []
    for line in re.split(r"[\r\n]", text.replace("\b", "")):
        line = re.sub(r"\d+(ms|us|s)(/step|/epoch)?", "T", line).rstrip()
        if not line:
            continue
        if found and not found[-1].startswith("Epoch") and not line.startswith("Epoch"):
            found.pop()
        found.append(line)
    return found

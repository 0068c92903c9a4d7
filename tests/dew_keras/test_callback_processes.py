"""Two processes fit one model: both decide the same, and only the first one prints and writes."""

import json

import numpy as np
import pytest

from tests.processes import run_pool

PROGRAM = """
import json, os, pathlib, sys
from unittest import mock
from dew.placement import initialize
assert initialize()
import jax, keras, numpy as np
import dew_keras
from tests.dew_keras.nets import Linear, rows

folder = pathlib.Path(sys.argv[1])
mine = folder / str(jax.process_index())  # where a file shows who wrote it
if jax.process_index() == 0:
    mine.mkdir()
x, y, _ = rows(16, width=32, classes=32)
model = dew_keras.Model(Linear(32))
layout = dew_keras.Layout(min_shard=512, tolerance=0)
model.compile(keras.optimizers.SGD(60.0), "mse", metrics=["mae"], mesh={"fsdp": 4}, layout=layout)
model.build(x)
stopping = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True, verbose=1)
callbacks = [
    stopping,
    keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, verbose=1),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9, verbose=1),
    keras.callbacks.ModelCheckpoint(
        str(mine / "{epoch}.weights.h5"), save_weights_only=True, monitor="loss", save_best_only=True, verbose=1
    ),
    keras.callbacks.CSVLogger(str(mine / "log.csv")),
    keras.callbacks.BackupAndRestore(str(mine / "backup"), double_checkpoint=True, delete_checkpoint=False),
    keras.callbacks.RemoteMonitor(send_as_json=True),
    dew_keras.TensorBoard(mine / "board", update_freq="batch"),
    keras.callbacks.ProgbarLogger(),
    keras.callbacks.TerminateOnNaN(),
]
with mock.patch("requests.post") as post:
    history = model.fit(x, y, 8, 8, 1, callbacks, validation_data=(x, y), shuffle=False)
score = model.evaluate(x, y, 8, 2)
snapshot = stopping.best_weights
assert not snapshot.is_on_host
assert not model.variables["params"]["dense"]["kernel"].is_fully_addressable
model.fit(x, y, 8, 1, 0)
model.set_weights(snapshot)
again = model.evaluate(x, y, 8, 0)
files = sorted(str(path.relative_to(mine)) for path in mine.rglob("*") if path.is_file()) if mine.exists() else []
result = [history.history, score, again, files, post.call_count, stopping.best_epoch]
(folder / f"result{jax.process_index()}.json").write_text(json.dumps(result))
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    outputs = run_pool(PROGRAM, str(folder))
    return [(json.loads((folder / f"result{i}.json").read_text()), outputs[i]) for i in range(2)]


def test_both_processes_decide_the_same(pool):
    (first, _), (second, _) = pool
    assert first[0] == second[0], "history"
    assert first[1:3] == second[1:3], "scores"
    assert first[5] == second[5], "best epoch"
    losses = first[0]["loss"]
    assert len(losses) < 8, "stopped early"
    assert first[0]["learning_rate"][-1] < first[0]["learning_rate"][0]
    np.testing.assert_allclose(first[2], first[1], rtol=1e-6)


def test_only_the_first_process_writes(pool):
    (first, _), (second, _) = pool
    assert second[3] == []
    assert second[4] == 0
    assert first[4] == len(first[0]["loss"])
    written = {name.split("/")[0] for name in first[3]}
    assert {"log.csv", "backup", "board", "1.weights.h5"} <= written
    names = [name for name in first[3] if name.startswith("backup")]
    assert "backup/latest.weights.h5" in names
    assert "backup/training_metadata.json" in names


def test_only_the_first_process_prints(pool):
    (_, first), (_, second) = pool
    # The transport of collective operations says hello by itself.
    assert [line for line in second.splitlines() if not line.startswith("[Gloo]")] == []
    for words in (
        "Epoch 1/8",
        "early stopping",
        "ReduceLROnPlateau",
        "finished saving",
        "LearningRateScheduler",
        "2/2",
    ):
        assert words in first

"""Two processes that hold a model together save it once and go on with it, as one process does."""

import numpy as np

import dew_keras
from tests.dew_keras.nets import Linear, rows
from tests.dew_keras.texts import tiny_language_module
from tests.processes import results, run_pool

PROGRAM = """
import json, pathlib, sys
from dew.placement import initialize
assert initialize()
import jax, numpy as np
import dew_keras
from tests.dew_keras import test_processes as shared
folder = pathlib.Path(sys.argv[1])
model = shared.build()
model.fit(shared.X, shared.Y, batch_size=4, verbose=0)
leaves = jax.tree.leaves(model.variables)
assert not all(leaf.is_fully_replicated for leaf in leaves)
model.save_weights(folder / "a.weights.h5")
model.save(folder / "m.keras")
shared.language().save(folder / "hf")
weights = model.get_weights()
again = shared.build(seed=5)
again.load_weights(folder / "m.keras")
for got, want in zip(again.get_weights(), weights, strict=True):
    np.testing.assert_array_equal(got, want)
losses = again.fit(shared.X, shared.Y, batch_size=4, epochs=2, initial_epoch=1, verbose=0).history["loss"]
blocked = folder / "file"
try:
    again.save_weights(blocked / "b.weights.h5")
    failed = ""
except OSError as error:
    failed = str(error)
print("RESULT " + json.dumps([losses, [float(w.sum()) for w in weights], failed]))
"""
X, Y, _ = rows(10, classes=64)  # the last batch does not divide over the four devices
LAYOUT = dew_keras.Layout(min_shard=64)


def build(seed=0):
    model = dew_keras.Model(Linear(64), seed=seed)
    model.compile("adam", "mse", mesh={"fsdp": 4}, layout=LAYOUT)
    return model


def language():
    model = dew_keras.Model(tiny_language_module(), seed=1)
    model.compile(mesh={"fsdp": 4}, layout=LAYOUT)
    return model


def test_two_processes_save_once_what_they_hold_together(tmp_path):
    (tmp_path / "file").touch()
    first, second = results(run_pool(PROGRAM, str(tmp_path)))
    assert first[:2] == second[:2]
    assert "file" in first[2]
    assert "Process 0 could not write" in second[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.weights.h5", "file", "hf", "m.keras"]
    model = build(seed=3)
    model.load_weights(tmp_path / "a.weights.h5")
    np.testing.assert_array_equal([float(w.sum()) for w in model.get_weights()], first[1])
    exported = dew_keras.load_model(tmp_path / "hf")
    for got, want in zip(exported.get_weights(), language().get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)
    losses = model.fit(X, Y, batch_size=4, epochs=2, initial_epoch=1, verbose=0).history["loss"]
    np.testing.assert_allclose(losses, first[0], rtol=1e-5)

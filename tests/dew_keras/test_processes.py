"""Two processes that hold a model together save it once and go on with it, as one process does."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

import dew_keras
from tests.dew_keras.nets import Linear, rows
from tests.dew_keras.texts import tiny_language_module

ROOT = pathlib.Path(__file__).resolve().parents[2]

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
X, Y, _ = rows(8, classes=64)
LAYOUT = dew_keras.Layout(min_shard=64)


def build(seed=0):
    model = dew_keras.Model(Linear(64), seed=seed)
    model.compile("adam", "mse", mesh={"fsdp": 4}, layout=LAYOUT)
    return model


def language():
    model = dew_keras.Model(tiny_language_module(), seed=1)
    model.compile(mesh={"fsdp": 4}, layout=LAYOUT)
    return model


def pool(program, *arguments):
    """Run a program in two processes of two devices each and return what each printed."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    env = dict(
        os.environ, PYTHONPATH=str(ROOT), XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu"
    )
    env |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "DEW_PROCESS_COUNT": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=env | {"DEW_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out.split("RESULT ")[1]) for out, _ in outputs]


def test_two_processes_save_once_what_they_hold_together(tmp_path):
    (tmp_path / "file").touch()
    first, second = pool(PROGRAM, str(tmp_path))
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

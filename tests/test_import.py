"""Importing is free: no backend starts, nothing is allocated, heavy libraries wait for their first use."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROBE = """
import json, os, sys
before = os.times()
{statement}
after = os.times()
from jax._src import xla_bridge
print(json.dumps({{
    "cpu_seconds": after.user + after.system - before.user - before.system,
    "has_backend": xla_bridge.backends_are_initialized(),
    "keras_backend": os.environ.get("KERAS_BACKEND"),
    "modules": sorted(name for name in sys.modules if "." not in name),
}}))
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("KERAS_BACKEND", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=kept | variables, capture_output=True, text=True, check=False
    )


def probe(statement: str, **variables: str) -> dict:
    result = run(PROBE.format(statement=statement), **variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@functools.cache
def imported(package: str) -> dict:
    return probe(f"import {package}")


@pytest.mark.parametrize("package", ["dew", "dew_keras"])
def test_importing_starts_no_backend_and_so_allocates_no_array(package):
    assert not imported(package)["has_backend"]


def test_the_probe_sees_a_started_backend():
    assert probe("import jax.numpy; jax.numpy.zeros(1)")["has_backend"]


def test_reaching_the_public_names_starts_no_backend_and_loads_no_keras():
    found = probe("from dew import MeshSpec, Layout, Trainer, Dataset, load_pretrained, pipeline")
    assert not found["has_backend"]
    assert "keras" not in found["modules"]


def test_importing_the_engine_costs_little_more_than_jax_and_flax():
    # Relative, because machines differ: the engine's own modules are small beside the libraries they stand on.
    libraries = min(probe("import jax, flax.linen, optax")["cpu_seconds"] for _ in range(2))
    engine = min(found["cpu_seconds"] for found in (imported("dew"), probe("import dew")))
    assert engine < 1.5 * libraries


def test_the_facade_selects_the_jax_backend_when_none_is_named():
    assert imported("dew_keras")["keras_backend"] == "jax"


def test_the_facade_says_what_to_do_when_keras_runs_on_another_backend():
    # Keras' numpy backend needs no other library, so this runs everywhere.
    result = run("import keras, dew_keras", KERAS_BACKEND="numpy")
    assert result.returncode != 0
    assert "KERAS_BACKEND" in result.stderr
    assert "jax" in result.stderr
    assert "numpy" in result.stderr


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, "None"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, "None"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, "32"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "NPROC": "3"}, "3"),
    ],
)
def test_importing_gives_simulated_devices_threads_unless_someone_has(variables, threads):
    kept = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    code = "import os, dew; print(os.environ.get('NPROC'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=kept | variables, capture_output=True, text=True)
    assert done.stdout.strip() == threads, done.stderr

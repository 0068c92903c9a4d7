"""`dew convert` writes what it read: from every format and from a run, in the checkpoint's dtype unless told."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dew
from dew.checkpoint import Checkpoints
from dew.cli.main import main
from dew.pretrained import describe, export
from tests.pretrained import gguf_files
from tests.pretrained.checkpoints import FIXTURES, everything_in

SAME = FIXTURES / "pickled" / "same"


def equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture
def gguf(tmp_path):
    config = json.loads((FIXTURES / "llama" / "config.json").read_text())
    gguf_files.write(
        tmp_path / "model.gguf",
        config,
        load_file(FIXTURES / "llama" / "model.safetensors"),
        gguf_files.gguf.GGMLQuantizationType.Q8_0,
    )
    return tmp_path / "model.gguf"


def test_a_gguf_file_becomes_the_checkpoint_it_describes(gguf, tmp_path):
    assert main(["convert", str(gguf), str(tmp_path / "out")]) == 0
    read, written = dew.load_pretrained(gguf), dew.load_pretrained(tmp_path / "out")
    assert written.module == read.module
    equal(written.variables, read.variables)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_the_dtype_is_the_checkpoints_unless_told(tmp_path, dtype):
    out = tmp_path / "out"
    assert main(["convert", str(SAME), str(out), *(["--dtype", dtype] if dtype else [])]) == 0
    before, after = load_file(SAME / "model.safetensors"), load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["dtype"] == (dtype or "bfloat16")
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert after[name].dtype == jnp.dtype(dtype or "bfloat16")
        np.testing.assert_array_equal(after[name], values.astype(after[name].dtype))


def test_pickled_weights_become_safetensors_when_allowed(tmp_path, capsys):
    whole = str(FIXTURES / "pickled" / "whole")
    assert main(["convert", whole, str(tmp_path / "out")]) == 1
    assert "allow_pickle" in capsys.readouterr().err
    assert main(["convert", whole, str(tmp_path / "out"), "--allow-pickle"]) == 0
    before, after = load_file(SAME / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    equal(before, after)


def test_shards_stay_below_the_limit_and_the_index_is_last(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(export, "_sync", lambda file: order.append(file.name.rsplit("/", 1)[1]))
    limit = 3000
    assert main(["convert", str(SAME), str(tmp_path / "out"), "--max-shard-bytes", str(limit)]) == 0
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    assert order[-len(shards) - 1 :] == [*shards, "model.safetensors.index.json"]
    for name in shards:
        values = load_file(tmp_path / "out" / name)
        assert sum(value.nbytes for value in values.values()) <= limit
    equal(dew.load_pretrained(tmp_path / "out").variables, dew.load_pretrained(SAME).variables)


@pytest.fixture
def run(tmp_path):
    """Two steps of a run that started from a checkpoint, its layers stored one by one, and the weights of each."""
    loaded = dew.load_pretrained(SAME, param_dtype="float32", scan_layers=False)
    checkpoints, weights = Checkpoints(tmp_path / "run"), {}
    for step in (3, 5):
        params = jax.tree.map(lambda leaf, step=step: leaf + step, loaded.variables["params"])
        state = {"variables": {"params": params}, "opt_state": {"mu": params}, "step": jnp.int32(step)}
        checkpoints.save(step, state, stacks=loaded.module.stack_view(), facts={})
        weights[step] = params
    checkpoints.close()
    return tmp_path / "run", weights


@pytest.mark.parametrize("step", [None, 3])
def test_a_run_becomes_a_checkpoint(run, tmp_path, step):
    directory, weights = run
    files = everything_in(directory)
    words = ["convert", str(directory), str(tmp_path / "out"), "--model", str(SAME), "--dtype", "float32"]
    assert main([*words, *(["--step", str(step)] if step else [])]) == 0
    got = dew.load_pretrained(tmp_path / "out", scan_layers=False)
    equal(got.variables["params"], weights[step or 5])
    assert got.module.layers == describe(SAME).module.layers
    assert everything_in(directory).keys() >= files.keys()


def test_a_run_is_written_in_the_dtype_of_its_checkpoint(run, tmp_path):
    assert main(["convert", str(run[0]), str(tmp_path / "out"), "--model", str(SAME)]) == 0
    assert {str(value.dtype) for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {"bfloat16"}


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "name the checkpoint that it started from with --model"),
        (["--model", str(FIXTURES / "llama")], "another model|other shapes"),
        (["--model", str(SAME), "--step", "4"], "no checkpoint of step 4"),
        (["--step", "3"], "--step is for a run"),
    ],
)
def test_what_does_not_fit_a_run_is_refused(run, tmp_path, capsys, words, told):
    assert main(["convert", str(run[0]), str(tmp_path / "out"), *words]) == 1
    assert re.search(told, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()

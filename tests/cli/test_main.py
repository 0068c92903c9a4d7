"""The `dew` command: what it prints, what it refuses, and with which status."""

import json
import pathlib
import subprocess
import sys

import pytest

from dew.cli.main import COMMANDS, main
from dew.cli.words import byte_count, mesh_factors

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
LLAMA = str(FIXTURES / "llama")


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS)
    assert main([]) == 2


def test_an_unknown_command_is_refused_with_the_list(capsys):
    assert main(["pln"]) == 2
    error = capsys.readouterr().err
    assert "Unknown command 'pln'; the commands are plan, convert. Did you mean 'plan'?" in error
    assert main(["launch"]) == 2
    assert "the commands are plan, convert" in capsys.readouterr().err


def test_plan_reads_the_config_and_prints_bytes_per_device(capsys):
    assert main(["plan", LLAMA, "--mesh", "fsdp=2,tensor=2", "--min-shard", "1", "--table", "--length", "32"]) == 0
    text = capsys.readouterr().out
    assert "on 4 devices (fsdp=2, tensor=2)" in text
    assert "optimizer state" in text
    assert "fsdp=2 splits" in text
    assert "self_attn/q_proj/kernel" in text
    assert main(["plan", LLAMA, "--mesh", "stage=3", "--min-shard", "1", "--schedule", "1f1b"]) == 0
    assert "whole token tables (1f1b)" in capsys.readouterr().out


def test_plan_needs_no_weights(tmp_path, capsys):
    for name in ("config.json",):
        (tmp_path / name).write_bytes((FIXTURES / "llama" / name).read_bytes())
    assert main(["plan", str(tmp_path), "--mesh", "fsdp=2"]) == 0
    assert "to train" in capsys.readouterr().out


def test_plan_says_what_is_wrong_in_one_line(capsys):
    assert main(["plan", LLAMA, "--mesh", "fsdp"]) == 1
    assert "dew plan: A mesh is written axis=factor" in capsys.readouterr().err
    assert main(["plan", "/does/not/exist", "--mesh", "fsdp=2"]) == 1
    assert "dew plan:" in capsys.readouterr().err
    assert main(["plan", LLAMA, "--mesh", "fsdp=2", "--device-memory", "much"]) == 1
    assert "80GB" in capsys.readouterr().err


def test_convert_writes_a_directory_that_loads_to_the_same_weights(tmp_path, capsys):
    import jax
    import numpy as np

    import dew

    out = tmp_path / "out"
    assert main(["convert", LLAMA, str(out)]) == 0
    assert "Wrote" in capsys.readouterr().out
    first, again = dew.load_pretrained(LLAMA), dew.load_pretrained(str(out))
    jax.tree.map(np.testing.assert_array_equal, first.variables, again.variables)
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"


def test_convert_does_not_write_over_what_is_there(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["convert", LLAMA, str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_module_runs_as_a_script():
    done = subprocess.run([sys.executable, "-m", "dew.cli.main", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Unknown command 'nothing'" in done.stderr


def test_mesh_factors_and_byte_counts():
    assert mesh_factors("fsdp=4, tensor=2") == {"fsdp": 4, "tensor": 2}
    assert mesh_factors("") == {}
    for wrong in ("fsdp=", "fsdp=x", "=2", "fsdp=2,fsdp=2", "fsdp=-1"):
        with pytest.raises(ValueError, match="axis=factor"):
            mesh_factors(wrong)
    assert [byte_count(text) for text in ("80GB", "16GiB", "1.5kB", "7")] == [80 * 10**9, 2**34, 1500, 7]
    for wrong in ("GB", "1 horse", "-1GB"):
        with pytest.raises(ValueError, match="number and a unit"):
            byte_count(wrong)

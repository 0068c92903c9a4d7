"""The quickstart's whole path on a tiny random checkpoint: everything but its figures, which need the real weights."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.published import write_checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quickstart_runs_through_and_says_when_it_misses_its_figures(tmp_path):
    checkpoint, examples = tmp_path / "tiny", tmp_path / "examples"
    write_checkpoint(checkpoint)
    # A copy saves beside itself, so that what a person's own run saved stays.
    shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("out", "models", "__pycache__"))
    result = subprocess.run(
        [sys.executable, str(examples / "quickstart.py"), str(checkpoint)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the same tokens" in result.stdout, result.stdout + result.stderr
    # Random weights learn no behaviour, and the example must not pass over that.
    assert result.stderr.strip().endswith("The quickstart missed its figures.")
    assert result.returncode == 1

"""Keras' own tests of its callbacks hold on `dew_keras.Model`, those apart that the tool lists with a reason."""

import pathlib
import re
import subprocess
import sys

import pytest

from tools.keras_callback_tests import SKIPPED

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_keras_tests_of_its_callbacks_pass_and_every_skip_has_a_reason():
    command = [sys.executable, str(ROOT / "tools" / "keras_callback_tests.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if "without tests" in run.stdout:
        pytest.skip("keras is installed without its tests")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed, failed, skipped = map(int, re.search(r"\| all \| (\d+) \| (\d+) \| (\d+) \|", run.stdout).groups())
    assert (passed >= 65, failed) == (True, 0)
    reasons = re.findall(r"^skipped \w+\.py::[\w:]+: (.+)$", run.stdout, re.MULTILINE)
    assert len(reasons) == skipped
    assert set(SKIPPED.values()) <= set(reasons), "an entry names no test"

"""Keras' own tests of its callbacks hold on `dew_keras.Model`, those apart that the tool lists with a reason."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_keras_tests_of_the_cheap_callbacks_pass():
    # `python tools/keras_callback_tests.py` without words runs them all.
    words = ["lambda_", "terminate", "csv_", "reduce_lr", "learning_rate", "remote_", "callback_test"]
    command = [sys.executable, str(ROOT / "tools" / "keras_callback_tests.py"), *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if "without tests" in run.stdout:
        pytest.skip("keras is installed without its tests")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed, failed, _ = re.search(r"\| all \| (\d+) \| (\d+) \| (\d+) \|", run.stdout).groups()
    assert int(passed) >= 30
    assert int(failed) == 0

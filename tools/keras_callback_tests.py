"""Run the tests that Keras ships for its callbacks, as they are installed, against `dew_keras.Model`.

`python tools/keras_callback_tests.py [WORD ...]` prints a table of passed, failed and skipped tests, of the files
whose names hold a WORD when there are any, and each skipped test with its reason: that of `SKIPPED` for what cannot
hold here, and otherwise Keras' own. It fails when a test fails that `SKIPPED` does not name.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import keras.src
import keras.src.callbacks.orbax_checkpoint
import pytest

from tools.keras_shaped_models import substituted

# Test (a part of its node id) or whole file to the reason why it cannot hold here.
IN_WORDS = "load_model of an Orbax folder; what OrbaxCheckpoint writes describes a Flax module in words only"
SKIPPED: dict[str, str] = {
    "BackupAndRestoreCallbackTest::test_best_case_step": "counts the batches of the interrupted epoch twice, which "
    "Keras starts again; here the fit goes on behind the batch that was saved",
    "CSVLoggerTest::test_stop_training_csv": "wants the nan that Keras validates to after it applied an infinite "
    "update; here such an update changes no weights, and the log says inf",
    "OrbaxCheckpointTest::test_checkpoint_loading_via_saving_api": IN_WORDS,
    "OrbaxCheckpointTest::test_comprehensive_model_state_restoration": IN_WORDS,
    "OrbaxCheckpointTest::test_distributed_checkpoint": f"{IN_WORDS}; layouts of keras.distribution",
    "OrbaxCheckpointTest::test_checkpoint_with_assets": "files of Keras' preprocessing layers; no Flax module has any",
    "OrbaxCheckpointTest::test_training_resumption": IN_WORDS,
    "tensorboard_test.py": "keras.callbacks.TensorBoard writes and its tests read through TensorFlow, which is no part "
    "of dew: `fit` refuses it without TensorFlow, and dew_keras.TensorBoard writes the scalars",
}


class Report:
    """A pytest plugin: substitutes models while tests are imported, skips what is listed, and counts."""

    def __init__(self) -> None:
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.reasons: list[tuple[str, str]] = []
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Import the tests with our models in the place of Keras' own."""
        with substituted(), stubs():
            return (yield)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip the listed tests."""
        for item in items:
            for part, reason in SKIPPED.items():
                if part in item.nodeid and "invalid_optimizer" not in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason=reason))

    def leave_out(self, file: pathlib.Path) -> None:
        """Count the tests of a listed file, which is not imported."""
        for test in re.findall(r"^ +def (test_\w+)", file.read_text(), re.MULTILINE):
            self.outcomes[file.name]["skipped"] += 1
            self.reasons.append((f"{file.name}::{test}", SKIPPED[file.name]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count an outcome."""
        if report.when == "call" or report.outcome != "passed":
            self._note(report, report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that cannot be imported, or skips itself."""
        if report.outcome != "passed":
            self._note(report, report.nodeid)

    def _note(self, report: Any, node: str) -> None:
        file, _, test = node.rpartition("/")[2].partition("::")
        self.outcomes[file][report.outcome] += 1
        if report.outcome == "failed":
            self.failed.append(f"{file}::{test}")
        elif report.outcome == "skipped":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons.append((f"{file}::{test}", reason.removeprefix("Skipped: ")))

    def table(self) -> str:
        """Return the counts by file, and every skip with its reason."""
        lines = ["| file | passed | failed | skipped |", "|---|---|---|---|"]
        counts = sorted(self.outcomes.items())
        total = sum((counter for _, counter in counts), collections.Counter())
        for file, counter in [*counts, ("all", total)]:
            lines.append(f"| {file} | {counter['passed']} | {counter['failed']} | {counter['skipped']} |")
        lines += ["", *(f"skipped {test}: {reason}" for test, reason in self.reasons)]
        lines += [f"FAILED {test}" for test in self.failed]
        return "\n".join(lines)


@contextlib.contextmanager
def stubs() -> Iterator[None]:
    """Stand for what the test files import beside Keras and never call on the JAX backend."""

    def skip_if_backend(name: str, reason: str) -> Any:
        return pytest.mark.skipif(keras.backend.backend() == name, reason=reason)

    made = {"conftest": types.ModuleType("conftest")}
    made["conftest"].skip_if_backend = skip_if_backend  # type: ignore[attr-defined]
    if importlib.util.find_spec("tensorflow") is None:
        # swap_ema_weights_test names it at the top, for the one test that is TensorFlow's.
        for name in ("tensorflow", "tensorflow.python", "tensorflow.python.eager"):
            made[name] = types.ModuleType(name)
        made["tensorflow.python.eager"].context = None  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def test_files(words: list[str]) -> list[pathlib.Path]:
    """List the installed test files of the callbacks.

    Args:
        words: Parts of the names wanted; none means all.
    """
    folder = pathlib.Path(keras.__file__).parent / "src" / "callbacks"
    files = sorted(folder.glob("*_test.py"))
    return [file for file in files if not words or any(word in file.name for word in words)]


def main(words: list[str]) -> int:
    """Run the tests, print the table, and return the exit code.

    Args:
        words: Parts of file names, and options of pytest.
    """
    options = [word for word in words if word.startswith("-")]
    files = test_files([word for word in words if not word.startswith("-")])
    if not files:
        print(f"Keras {keras.__version__} is installed without tests of its callbacks.")
        return 1
    report, read = Report(), [str(file) for file in files if file.name not in SKIPPED]
    for file in files:
        if file.name in SKIPPED:
            report.leave_out(file)
    fixed = ["-q", "--no-header", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull]
    code = pytest.main([*fixed, "-W", "ignore", *options, *read], plugins=[report]) if read else 0
    print(f"\nKeras {keras.__version__}, tests of callbacks against dew_keras.Model\n\n{report.table()}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

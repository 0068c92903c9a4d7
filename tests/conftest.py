"""Eight simulated CPU devices for every test, compiled programs kept between runs, skips that say why.

The variables are set before anything imports JAX.
"""

import collections
import gc
import importlib.util
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

from tools.compilation import bound_programs, simulation_flags

ROOT = pathlib.Path(__file__).resolve().parents[1]

os.environ["JAX_PLATFORMS"] = "cpu"
# Eight simulated devices wait for each other at every collective; XLA ends the process where one is 40 seconds late.
# On a machine with other work that is no deadlock; a real one still ends, in five minutes.
PATIENT_COLLECTIVES = ["--xla_cpu_collective_call_terminate_timeout_seconds=300"]
os.environ["XLA_FLAGS"] = " ".join(
    [
        *(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag),
        *simulation_flags(8),
        *PATIENT_COLLECTIVES,
    ]
)
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
# Small programs are most of a test run: keep all that took any time to compile.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# The tests must not depend on a connection: what a test needs is made by a tool and kept in tests/fixtures.
os.environ["HF_HUB_OFFLINE"] = "1"

# A run that was started in the background ignores Ctrl-C, and so would the tests that send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What the imports and the collection make lives on: nobody looks for garbage before `pytest_collection_finish`.
gc.disable()

import pytest  # noqa: E402

from tests import shape_checks  # noqa: E402

shape_checks.install()

REFERENCE_LIBRARIES = ("torch", "transformers")


def missing_libraries() -> list[str]:
    """List the reference libraries that are not installed."""
    return [name for name in REFERENCE_LIBRARIES if importlib.util.find_spec(name) is None]


@pytest.fixture(autouse=True, scope="module")
def bounded_programs() -> Iterator[None]:
    """Drop compiled programs behind a module where there are many; the next ones read them from the disk."""
    yield
    bound_programs()


def pytest_collection_finish() -> None:
    """Look through all objects for garbage seldom, and never through what the imports made: most of them live on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)
    gc.enable()


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Let `gc.collect()` look at what the test makes: over all that hundreds of tests left, each takes a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def published_hub(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A Hub cache in which the published model's name stands for a tiny random checkpoint."""
    from tests.published import publish

    hub = tmp_path_factory.mktemp("hub")
    publish(hub)
    return hub


@pytest.fixture
def published_models(published_hub: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `hf://` names resolve in that cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(published_hub))


@pytest.fixture(scope="session")
def smollm2_file() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once; skips where it cannot be."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from download_smollm2 import download_smollm2

        return download_smollm2()
    except RuntimeError as error:
        pytest.skip(f"no SmolLM2 weights: {str(error).splitlines()[0]}")
    finally:
        sys.path.remove(str(ROOT / "examples"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which `make newest` asks for fewer cases of every test."""
    parser.addoption("--ends", action="store_true", help="of each test, run its first case and its last one only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--ends` does, and skip live comparisons where a library they compare with is not installed."""
    if config.getoption("--ends"):
        cases = collections.defaultdict(list)
        for item in items:
            cases[item.nodeid.partition("[")[0]].append(item)
        kept = {id(item) for of_one in cases.values() for item in (of_one[0], of_one[-1])}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]
    missing = missing_libraries()
    if not missing:
        return
    skip = pytest.mark.skip(reason=f"not installed: {', '.join(missing)} (`make reference`)")
    for item in items:
        if item.get_closest_marker("reference"):
            item.add_marker(skip)

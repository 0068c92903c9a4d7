"""A few damaged inputs of every kind are read or refused, and those that once did worse stay refused."""

import importlib.util
import pathlib
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOUND = sorted((ROOT / "tests" / "fixtures" / "fuzz").glob("*.bin"))


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("fuzz_readers", ROOT / "tools" / "fuzz_readers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_damage_is_refused_or_harmless(tool, capsys):
    names = sorted(tool.targets())
    assert tool.run(names, seconds=300, seed=7, keep=None, limit=20) == dict.fromkeys(names, 0), capsys.readouterr().out


@pytest.mark.parametrize("found", FOUND, ids=lambda path: path.stem)
def test_what_once_failed_is_refused(tool, found, tmp_path):
    read, _, _ = tool.targets()[found.stem.split("-")[0]]
    path = tmp_path / "input.bin"
    path.write_bytes(found.read_bytes())
    with pytest.raises(tool.REFUSALS):
        read(path)


def wordless(path):
    raise ValueError


@pytest.mark.parametrize("does, told", [(lambda path: {}["a"], "KeyError"), (wordless, "without a word")])
def test_the_tool_sees_what_it_looks_for(tool, tmp_path, does, told):
    assert told in tool.failure(does, tmp_path)


def test_the_tool_sees_a_reader_that_takes_memory(tool, tmp_path, monkeypatch):
    peaks = iter([types.SimpleNamespace(ru_maxrss=kilobytes) for kilobytes in (100, 100 + 600 * 2**10)])
    monkeypatch.setattr(tool.resource, "getrusage", lambda who: next(peaks))
    assert tool.failure(lambda path: None, tmp_path) == "took 600 MiB"


def test_the_tool_sees_a_slow_reader(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "CASE_SECONDS", 0.0)
    assert "took 0.0 s" in tool.failure(lambda path: None, tmp_path)

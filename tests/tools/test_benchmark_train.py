"""The comparisons with code written by hand do the same work as it does; their status says whether the bar is held."""

import importlib
import pathlib
import re

import pytest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
NAMES = ("handwritten scan", "handwritten unrolled", "dew")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


def test_steps_give_the_losses_of_the_handwritten_ones(tool, monkeypatch, capsys):
    train = tool("benchmark_train")
    monkeypatch.setattr(train, "BAR", 0.0)
    assert train.main(train.Options(layers=2, vocab=64, rows=1, length=8, samples=1)) == 1
    told = capsys.readouterr().out
    lines = [line for line in told.splitlines() if line.startswith(NAMES) and "/" not in line]
    losses = [[float(loss) for loss in re.findall(r"\d\.\d{6}", line)] for line in lines]
    assert [len(each) for each in losses] == [3, 3, 3]
    for each in losses[:2]:
        assert each == pytest.approx(losses[2], rel=1e-5)
    assert losses[0][2] < losses[0][0]
    monkeypatch.setattr(train, "BAR", float("inf"))
    assert train.main(train.Options(layers=2, vocab=64, rows=1, length=8, samples=1, only=("dew",))) == 0


def test_tokens_are_those_of_the_handwritten_loops(tool, monkeypatch, capsys):
    generation = tool("benchmark_generate")
    monkeypatch.setattr(generation, "BAR", float("inf"))
    options = generation.Options(layers=2, vocab=64, rows=(2,), prompt=4, new_tokens=3, samples=1)
    assert generation.main(options) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(NAMES)]
    assert [row.split()[-1] for row in rows[:3]] == ["1.000"] * 3
    monkeypatch.setattr(generation, "BAR", 0.0)
    monkeypatch.setattr(generation, "contenders", lambda shape, options, prompts: {"dew": lambda: prompts})
    assert generation.main(options) == 0

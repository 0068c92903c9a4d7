"""A load shows bytes and rate once, where a person looks; a callable is told instead."""

import io

import jax
import pytest
from rich.console import Console

from dew.pretrained import load_pretrained
from dew.pretrained import progress as bars
from dew.pretrained.progress import showing
from tests.pretrained.checkpoints import FIXTURES


def shown(progress):
    """What a load of 300 of 400 MB draws."""
    text = io.StringIO()
    with showing(progress, "Loading it", Console(file=text, force_terminal=True, width=120)) as told:
        if told is not None:
            for done in (100, 200, 300):
                told(done * 2**20, 400 * 2**20)
    return text.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_shows_bytes_and_rate():
    drawn = shown(True)
    assert "Loading it" in drawn
    assert "300.0/400.0 MiB" in drawn
    assert "/s" in drawn


def test_the_bar_is_for_terminals_unless_asked_for(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert shown(None) == shown(False) == ""
    monkeypatch.setattr("sys.stderr", Terminal())
    assert "MiB" in shown(None)
    assert shown(False) == ""


def test_the_bar_is_drawn_by_one_process(monkeypatch):
    monkeypatch.setattr(bars, "is_primary", lambda: False)
    assert shown(True) == ""
    told = []
    with showing(lambda *counts: told.append(counts), "it") as tell:
        tell(1, 2)
    assert told == [(1, 2)]


def test_a_load_reports_every_byte(capsys):
    told = []
    loaded = load_pretrained(FIXTURES / "llama", progress=lambda *counts: told.append(counts))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.variables))
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    load_pretrained(FIXTURES / "llama", progress=True)
    assert "Loading llama" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["yes", 3])
def test_what_is_no_progress_is_refused(wrong):
    with pytest.raises(TypeError, match="must be True, False, None or a callable"):
        load_pretrained(FIXTURES / "llama", progress=wrong)

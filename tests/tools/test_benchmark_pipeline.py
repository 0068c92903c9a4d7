"""The pipeline benchmark counts the idle share that the timetable says, in a table that fits its header."""

import pytest

from tools.benchmark_pipeline import HEADER, Options, measure


@pytest.mark.parametrize("schedule, layers", [("gpipe", 2), ("1f1b", 2), ("1f1b", 4)])
def test_the_operations_of_a_step_show_the_idle_share_of_the_timetable(schedule, layers):
    options = Options(layers=layers, width=32, length=32, vocab=80, samples=0)
    found = measure(options, schedule, stages=2, microbatches=4)
    assert found.idle == pytest.approx(1 / 5)
    assert found.computed_idle == pytest.approx(found.idle, abs=0.005)
    assert found.row().count("|") == HEADER.splitlines()[0].count("|")

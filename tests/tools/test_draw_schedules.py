"""The committed pictures of the schedules are what the tool draws from the timetables."""

import importlib.util
import pathlib

import pytest

from dew.parallel.schedules import gpipe_timetable, one_f_one_b_timetable

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"


def load_tool():
    spec = importlib.util.spec_from_file_location("draw_schedules_tool", ROOT / "tools" / "draw_schedules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@pytest.mark.parametrize("name", ["gpipe.svg", "one_f_one_b.svg"])
def test_the_committed_picture_is_what_the_tool_draws(name):
    assert (PICTURES / name).read_text() == tool.pictures()[name]


def test_a_picture_names_each_microbatch_once_per_stage_and_direction():
    for text in tool.pictures().values():
        for microbatch in range(tool.MICROBATCHES):
            assert text.count(f">{microbatch}</text>") == 2 * tool.STAGES


@pytest.mark.parametrize("stages, microbatches", [(1, 3), (2, 2), (3, 8), (4, 4)])
def test_the_legend_counts_what_a_stage_keeps(stages, microbatches):
    gpipe, one_f_one_b = (make(stages, microbatches) for make in (gpipe_timetable, one_f_one_b_timetable))
    assert tool.most_kept(gpipe) == microbatches
    assert tool.most_kept(one_f_one_b) == min(microbatches, one_f_one_b.slots)

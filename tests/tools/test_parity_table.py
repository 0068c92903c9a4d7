"""The page's table of families says of each what the code and the tests say, with a figure within the tolerance."""

import pathlib

from dew.pretrained.families import FAMILIES
from tests.pretrained.test_parity import TOLERANCE
from tools import parity_table as tool

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "loading.md"


def test_the_page_has_a_row_for_each_family():
    lines = PAGE.read_text().splitlines()
    rows = lines[lines.index(tool.line(tool.HEADER)) + 2 :][: len(FAMILIES)]
    for row, (model_type, names) in zip(rows, tool.fixtures().items(), strict=True):
        *stated, figure = row.strip("| ").split(" | ")
        assert stated == tool.described(model_type, names), "print the table again: python -m tools.parity_table"
        assert 0 < float(figure) <= TOLERANCE


def test_a_row_is_measured():
    assert 0 < tool.largest_difference(["llama"]) <= TOLERANCE

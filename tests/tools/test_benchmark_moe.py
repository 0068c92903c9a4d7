"""The benchmark of experts measures a form after the other, in a table that fits its header."""

import argparse
import itertools

from tools.benchmark_moe import HEADER, rows


def test_each_form_is_measured_and_is_a_row():
    sizes = {"rows": 8, "length": 4, "width": 8, "features": 8, "experts": 4, "top_k": 2, "repeats": 2}
    table = itertools.islice(rows(argparse.Namespace(**sizes), skewed=True), 3)  # of two repeats each, on one device
    cells = [line.strip("| ").split(" | ") for line in table]
    assert {len(row) for row in cells} == {HEADER.splitlines()[0].count("|") - 1}
    assert [row[:3] for row in cells] == [
        ["1", "grouped products, blocks", "skewed"],
        ["1", "capacity_factor=1.25", "skewed"],
        ["1", "grouped products, ragged", "skewed"],
    ]

"""The scan benchmark prints its table and holds the bar; and what it times does not grow with depth by its make."""

import pytest

from tools import benchmark_scan
from tools.benchmark_scan import BAR, Options, main, trainer_of

TINY = Options(depths=(1, 2), unrolled=1, width=32, length=8, vocab=64, compiles=1, samples=1)


@pytest.fixture(autouse=True)
def cached(monkeypatch):
    monkeypatch.setattr(benchmark_scan.jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(benchmark_scan.jax, "clear_caches", lambda: None)


def test_the_table_has_a_row_for_each_depth_and_unrolled_ones_as_far_as_asked(capsys):
    assert main(TINY) == 0
    header, _, one, two = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    assert header == ["layers", "compile, s, scanned", "unrolled", "step, ms, scanned", "unrolled"]
    assert (one[0], two[0], two[2], two[4]) == ("1", "2", "-", "-")
    assert all(float(cell.split(" ")[0]) > 0 for cell in (*one, two[1], two[3]))


@pytest.mark.parametrize("growth, status", [(0.9, 0), (BAR, 0), (1.3, 1)])
def test_the_status_says_whether_the_bar_is_held(growth, status, monkeypatch, capsys):
    medians = {8: 4.0, 64: 4.0 * growth}
    monkeypatch.setattr(benchmark_scan, "measure", lambda options, depth, is_scanned: ([medians[depth]], [1.0]))
    assert main(Options(depths=(8, 64), unrolled=0)) == status
    assert f"from 8 to 64 layers: x{growth:.2f} (bar: x{BAR})" in capsys.readouterr().out


def test_the_scanned_step_has_as_many_instructions_at_64_layers_as_at_8():
    def instructions(depth, *, is_scanned):
        batch = {"tokens": benchmark_scan.np.ones((2, TINY.length + 1), int)}
        return trainer_of(TINY, depth, is_scanned=is_scanned).lower(batch).as_text().count(" = ")

    assert instructions(8, is_scanned=True) == instructions(64, is_scanned=True)
    assert instructions(1, is_scanned=False) < instructions(2, is_scanned=False)

"""The device check runs its parts to the end here, and tells apart what passed, what failed and what could not run."""

import pytest

from tools import device_check


def found(part):
    yield "one line"
    if part == "fails":
        raise AssertionError("the reason")
    if part == "cannot":
        raise device_check.NotRun("one device")


def test_parts_end_as_ok_failed_or_not_run_and_the_rest_go_on(capsys):
    parts = {name: lambda sizes, name=name: found(name) for name in ("passes", "fails", "cannot", "last")}
    results = device_check.check(parts, device_check.TINY, 60.0)
    assert results == {
        "passes": "ok",
        "fails": "FAILED: AssertionError: the reason",
        "cannot": "not run: one device",
        "last": "ok",
    }
    assert capsys.readouterr().out.count("one line") == 4
    assert device_check.check(parts, device_check.TINY, 0.0)["last"] == "not run: 0 s were used"


def test_the_exit_status_is_that_of_the_parts(monkeypatch):
    monkeypatch.setattr(
        device_check, "PARTS", {"good": lambda sizes: found("passes"), "bad": lambda sizes: found("fails")}
    )
    assert device_check.main(["--parts", "good"]) == 0
    assert device_check.main([]) == 1


@pytest.mark.parametrize("name", ["devices", "kernel speed", "host memory", "collectives", "grouped", "one device"])
def test_a_part_runs_here_or_says_why_not(name, capsys):
    result = device_check.check({name: device_check.PARTS[name]}, device_check.TINY, 60.0)[name]
    reasons = {
        "devices": "ok",
        "kernel speed": "not run: the table chooses XLA here: there is nothing to compare",
        "host memory": "not run: a cpu reports no device memory",
        "collectives": "not run: a CPU has no reduce-scatter",
        "grouped": "ok",
        "one device": "ok",
    }
    assert result == reasons[name]


def test_kernels_are_compared_and_a_wrong_one_fails(monkeypatch):
    monkeypatch.setattr(device_check, "CASES", device_check.CASES[6:7])
    sizes = device_check.dataclasses.replace(device_check.TINY, length=64)
    parts = {"kernels": device_check.kernels}
    assert device_check.check(parts, sizes, 60.0) == {"kernels": "ok"}
    monkeypatch.setattr(device_check, "TOLERANCE", {"bfloat16": 1e-9})
    assert device_check.check(parts, sizes, 60.0)["kernels"].startswith("FAILED: AssertionError: documents by xla")


def test_blocks_are_compared_with_all_logits_at_once(monkeypatch):
    monkeypatch.setattr(device_check, "CASES", device_check.CASES[7:8])
    sizes = device_check.dataclasses.replace(device_check.TINY, length=300)
    assert device_check.check({"blocks": device_check.blocks}, sizes, 60.0) == {"blocks": "ok"}
    monkeypatch.setattr(device_check, "TOLERANCE", {"float32": 1e-12})
    assert device_check.check({"blocks": device_check.blocks}, sizes, 60.0)["blocks"].startswith("FAILED: Assert")


def test_a_rejected_update_and_the_use_of_the_device_are_measured(capsys):
    sizes = device_check.dataclasses.replace(device_check.TINY, length=32)
    names = ("rejected update", "utilisation")
    assert device_check.check({name: device_check.PARTS[name] for name in names}, sizes, 60.0) == dict.fromkeys(
        names, "ok"
    )
    assert "TFLOP a second: the peak of a cpu is not known here" in capsys.readouterr().out

"""The device check runs its parts to the end here, and tells apart what passed, what failed and what could not run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from tools.device_check import __main__ as command
from tools.device_check import attention, parts, products, training

SIZES = dataclasses.replace(parts.TINY, length=48)
NOT_HERE = {
    "kernel speed": "not run: the table chooses XLA here: there is nothing to compare",
    "host memory": "not run: a cpu reports no device memory",
    "collectives": "not run: a CPU has no reduce-scatter",
    "fp8": "not run: a cpu multiplies fp8 numbers as wider ones",
}


def found(part):
    yield "one line"
    if part == "fails":
        raise AssertionError("the reason")
    if part == "cannot":
        raise parts.NotRun("one device")


def test_parts_end_as_ok_failed_or_not_run_and_the_rest_go_on(capsys):
    given = {name: lambda sizes, name=name: found(name) for name in ("passes", "fails", "cannot", "last")}
    results = parts.check(given, parts.TINY, 60.0)
    assert results == {
        "passes": "ok",
        "fails": "FAILED: AssertionError: the reason",
        "cannot": "not run: one device",
        "last": "ok",
    }
    assert capsys.readouterr().out.count("one line") == 4
    assert parts.check(given, parts.TINY, 0.0)["last"] == "not run: 0 s were used"


def test_the_exit_status_is_that_of_the_parts(monkeypatch):
    monkeypatch.setattr(command, "PARTS", {name: lambda sizes, name=name: found(name) for name in ("good", "fails")})
    assert command.main(["--parts", "good"]) == 0
    assert command.main([]) == 1


@pytest.mark.parametrize("name", command.PARTS)
def test_a_part_runs_here_or_says_why_not(name, monkeypatch, capsys):
    monkeypatch.setattr(attention, "CASES", attention.CASES[7:8])
    if name == "kernel speed":
        monkeypatch.undo()  # it begins with the first case
    assert parts.check({name: command.PARTS[name]}, SIZES, 60.0) == {name: NOT_HERE.get(name, "ok")}
    if name == "utilisation":
        assert "TFLOP a second: the peak of a cpu is not known here" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["kernels", "blocks", "state-space scan", "delta rule", "grouped"])
def test_a_part_that_compares_fails_where_its_tolerance_is_passed(name, monkeypatch):
    monkeypatch.setattr(attention, "CASES", attention.CASES[7:8])
    strict = functools.partial(lambda whole, got, want, limit, *rest: whole(got, want, 1e-12, *rest), parts.differences)
    monkeypatch.setattr(parts, "differences", strict)
    result = parts.check({name: command.PARTS[name]}, dataclasses.replace(SIZES, length=40), 60.0)[name]
    assert result.startswith("FAILED: AssertionError: ")
    assert result.endswith("of the largest value, over 1e-12")


def test_products_that_nothing_rounded_or_too_much_did_fail(monkeypatch):
    part = {"int8": command.PARTS["int8"]}
    monkeypatch.setattr(products, "ROUNDING", {"int8": (0.5, 1.0)})
    assert "nothing was rounded" in parts.check(part, SIZES, 60.0)["int8"]
    monkeypatch.setattr(products, "ROUNDING", {"int8": (0.0, 1e-6)})
    assert "of the largest value, over 1e-06" in parts.check(part, SIZES, 60.0)["int8"]


PROGRAM = """HloModule step

%fused (a: s8[4,8], b: s8[8,2]) -> s32[4,2] {{
  %a = {element}[4,8]{{1,0}} parameter(0)
  %b = s8[8,2]{{1,0}} parameter(1)
  ROOT %dot = s32[4,2]{{1,0}} {product}(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (a: s8[4,8], b: s8[8,2]) -> s32[4,2] {{
  %a.1 = s8[4,8]{{1,0}} parameter(0)
  %b.1 = s8[8,2]{{1,0}} parameter(1)
  ROOT %f = s32[4,2]{{1,0}} fusion(%a.1, %b.1), kind=kCustom, calls=%fused
}}
"""


@pytest.mark.parametrize(
    "element, product, holds", [("s8", "dot", True), ("s8", "custom-call", True), ("bf16", "dot", False)]
)
def test_a_program_multiplies_8_bit_numbers_only_where_both_factors_are(element, product, holds):
    assert products.multiplies(PROGRAM.format(element=element, product=product), "s8") is holds


def test_a_program_compiled_here_is_read(monkeypatch):
    compiled = jax.jit(jnp.matmul).lower(jnp.ones((4, 8)), jnp.ones((8, 2))).compile().as_text()
    assert products.multiplies(compiled, "f32")
    assert not products.multiplies(compiled, "s8")


def test_the_peak_of_a_device_is_its_own():
    # A kind that only begins alike is another device: H200 NVL is slower than H200.
    assert all(peak < 3e15 and source for peak, source in training.PEAKS.values())
    assert "NVIDIA H200 NVL" not in training.PEAKS

"""The digits example reaches the accuracy that it promises, on its default mesh and split over another."""

import importlib.util
import pathlib

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.mark.parametrize("mesh", [None, {"fsdp": 4, "tensor": 2}], ids=str)
def test_digits_are_told_apart(mesh, capsys):
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(mesh, epochs=8) > 0.95
    assert "validation accuracy 0.9" in capsys.readouterr().out

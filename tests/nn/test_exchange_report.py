"""The report names the exchange of each kind of layer, and lengths that no exchange takes are refused beforehand."""

import pytest

from dew.nn.exchange_report import check_row_length, exchange_report
from dew.placement.layout import LayoutRefused
from dew.planning import estimate_bytes, plan_text, planned_mesh
from tests.tiny import tiny_decoder, tiny_layer

LAYERS = (tiny_layer(), tiny_layer(window=8), tiny_layer(), tiny_layer(chunk=24))


def test_each_kind_of_layer_has_a_line_with_its_exchange_and_bytes():
    module = tiny_decoder(layers=LAYERS)
    dense, windowed, chunked = exchange_report(module, mesh=planned_mesh({"sequence": 4}), num_tokens=64, rows=2)
    # Queries, the result, and keys and values repeated to four heads: 3/4 of 2 x 16 x 16 x 8 floats leave, twice.
    assert dense.startswith("exchange of 2 layers of 64 tokens: all_to_all, 24,576 bytes a device (the heads divide")
    assert "banded cannot: it needs a window or chunks" in dense
    # Seven keys and values of two heads, both ways.
    assert windowed.startswith("exchange of 1 layer of 64 tokens, window 8: banded, 3,584 bytes a device (what a token")
    assert "exchange of 1 layer of 64 tokens, chunk 24: banded" in chunked
    assert exchange_report(module, mesh=planned_mesh({"tensor": 2})) == []


def test_a_plan_says_it():
    estimate = estimate_bytes(tiny_decoder(layers=LAYERS), planned_mesh({"sequence": 8}), slots=40)
    refused = "exchange of 2 layers of 40 tokens: refused: Rows of 40 positions do not divide into 16"
    assert refused in plan_text(estimate)


def test_a_length_that_a_layer_cannot_take_is_refused_with_lengths_that_work():
    module = tiny_decoder(layers=LAYERS)
    check_row_length(module, planned_mesh({"sequence": 8}), 48)
    check_row_length(module, planned_mesh({"fsdp": 8}), 41)
    with pytest.raises(LayoutRefused, match=r"Rows of 40 positions do not divide into 16 .* Use rows of 32 or 48 "):
        check_row_length(module, planned_mesh({"sequence": 8}), 40)
    with pytest.raises(LayoutRefused, match=r"Rows of 41 positions do not divide into 8 .* Use rows of 40 or 48 "):
        check_row_length(module, planned_mesh({"sequence": 8}), 41)

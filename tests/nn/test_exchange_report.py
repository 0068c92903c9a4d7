"""The report names the exchange of each kind of layer, and lengths that no exchange takes are refused beforehand."""

import re
import types

import pytest
from jax.sharding import AbstractDevice

from dew.kernels.attention_choice import Accelerator
from dew.nn.block import LayerSpec
from dew.nn.exchange_report import check_row_length, exchange_report
from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.norm import NormSpec
from dew.placement.layout import LayoutRefused
from dew.planning import estimate_bytes, plan_text, planned_mesh
from tests.tiny import tiny_decoder, tiny_layer

SCAN = Mamba2Spec(num_heads=4, head_dim=8, num_groups=1, state_size=6)
DELTA = GatedDeltaNetSpec(num_heads=4, head_dim=8, num_keys=2, key_dim=6)
LAYERS = (tiny_layer(), tiny_layer(window=8), tiny_layer(), tiny_layer(chunk=24))


def test_each_kind_of_layer_has_a_line_with_its_exchange_and_bytes():
    module = tiny_decoder(layers=LAYERS)
    dense, windowed, chunked, packed = exchange_report(
        module, mesh=planned_mesh({"sequence": 4}), num_tokens=64, rows=2
    )
    # Queries, the result, and keys and values repeated to four heads: 3/4 of 2 x 16 x 16 x 8 floats leave, twice.
    assert dense.startswith("exchange of 2 layers of 64 tokens: all_to_all, 24,576 bytes a device (the heads divide")
    assert "banded cannot: it needs a window or chunks" in dense
    assert dense.endswith(
        "; kernel xla (not cudnn: the device is a cpu, dtype float32; not tpu: the device is a cpu, heads are 8 wide, "
        "64 queries and 64 keys)"
    )
    # Seven keys and values of two heads, both ways.
    assert windowed.startswith("exchange of 1 layer of 64 tokens, window 8: banded, 3,584 bytes a device (what a token")
    assert "exchange of 1 layer of 64 tokens, chunk 24: banded" in chunked
    # In documents a chunk is a window that begins anywhere: of 24 tokens, longer than the slice of 16.
    assert "exchange of 1 layer of 64 tokens, chunk 24 in documents or padded: all_to_all" in packed
    assert exchange_report(module, mesh=planned_mesh({"tensor": 2})) == []


def test_a_plan_and_its_explanation_say_it():
    estimate = estimate_bytes(tiny_decoder(layers=LAYERS), planned_mesh({"sequence": 8}), slots=40)
    text = plan_text(estimate)
    refused = r"exchange of 2 layers of 40 tokens: refused: No exchange .*40 positions do not divide into 16 .*32 or 48"
    assert re.search(refused, text)
    assert re.search(refused, estimate.explanation.summary())
    assert re.search(r"\nRefused: No exchange .*40 positions do not divide into 16 .* Use rows of 32 or 48 pos", text)
    # What one device would run says nothing of what the exchange leaves it.
    assert "\nattention of" not in text
    assert re.search(
        "exchange of 1 layer of 40 tokens, window 8: ring, .*; kernel xla .not cudnn: the exchange attends", text
    )


def test_a_length_that_a_layer_cannot_take_is_refused_with_lengths_that_work():
    module = tiny_decoder(layers=LAYERS)
    check_row_length(module, planned_mesh({"sequence": 8}), 48)
    check_row_length(module, planned_mesh({"fsdp": 8}), 41)
    with pytest.raises(LayoutRefused, match=r"40 positions do not divide into 16 .* Use rows of 32 or 48 positions"):
        check_row_length(module, planned_mesh({"sequence": 8}), 40)
    with pytest.raises(LayoutRefused, match=r"41 positions do not divide into 8 .* Use rows of 32 or 48 positions"):
        check_row_length(module, planned_mesh({"sequence": 8}), 41)


def test_lengths_are_those_that_every_layer_takes():
    reach = LayerSpec(mixer=SCAN, mlp=None, norm=NormSpec(eps=1e-5))
    module, mesh = tiny_decoder(layers=(tiny_layer(), reach)), planned_mesh({"sequence": 8})
    check_row_length(module, mesh, 32)
    # Slices of 3 have no halves for the attention; those of 2 have, but the convolution reads 3 tokens back.
    for length, message in ((24, "24 positions do not divide into 16"), (16, "slices of at least 3 .* 16 is not")):
        with pytest.raises(LayoutRefused, match=rf"{message}.* Use rows of 32 positions"):
            check_row_length(module, mesh, length)
    with pytest.raises(LayoutRefused, match=r"No row within the context of 64 fits sequence=32\. Use sequence=16\."):
        check_row_length(module, planned_mesh({"sequence": 32}), 64)
    check_row_length(module, planned_mesh({"sequence": 16}), 64)


def test_a_plan_and_the_lines_of_layers_advise_what_every_layer_takes():
    module = tiny_decoder(layers=(tiny_layer(), LayerSpec(mixer=SCAN, mlp=None, norm=NormSpec(eps=1e-5))))
    estimate = estimate_bytes(module, planned_mesh({"sequence": 8}), slots=24)
    # The attention alone would take 16 too.
    assert re.search(r"24 positions do not divide into 16 .* Use rows of 32 positions\.$", estimate.refusal)
    assert estimate.explanation.layers[0].endswith(" Use rows of 32 positions.")
    assert estimate_bytes(module, planned_mesh({"sequence": 8}), slots=32).refusal is None


def test_an_exchange_named_that_a_layer_cannot_take_is_refused_with_the_choice():
    module = tiny_decoder(layers=(tiny_layer(), tiny_layer(window=8)), sequence_impl="banded")
    with pytest.raises(LayoutRefused, match=r"it needs a window or chunks\. Use sequence_impl='auto'\.$"):
        check_row_length(module, planned_mesh({"sequence": 4}), 32)


def test_a_kernel_that_cannot_drop_is_refused_to_those_who_train_alone():
    module = tiny_decoder(attention_dropout_rate=0.5, attention_impl="cudnn", dtype="bfloat16")
    mesh, hopper = planned_mesh({"sequence": 4}), Accelerator(platform="cuda", capability=(9, 0), cudnn=91000)
    check_row_length(module, mesh, 32, train=False, device=hopper)
    with pytest.raises(LayoutRefused, match=r"it has no dropout of probabilities.* Use attention_impl='auto'\.$"):
        check_row_length(module, mesh, 32, device=hopper)
    # What is refused for another reason still is.
    with pytest.raises(LayoutRefused, match="33 positions do not divide into 4"):
        check_row_length(module, mesh, 33, train=False, device=hopper)


def test_a_smaller_axis_is_advised_for_the_devices_that_the_mesh_is_described_by():
    tpus = AbstractDevice(device_kind="TPU v5", num_cores=1, platform="tpu")
    mesh = planned_mesh({"sequence": 256}).update(abstract_device=tpus)
    module = tiny_decoder(layers=(tiny_layer(head_dim=64),), attention_impl="tpu", max_length=128)
    # Four heads, which the kernel gets whole: on another device it would run on none.
    with pytest.raises(LayoutRefused, match=r"fits sequence=256\. Use sequence=4\."):
        check_row_length(module, mesh, 128)


def test_layers_of_a_module_of_another_kind_are_not_read():
    check_row_length(types.SimpleNamespace(layers=4), planned_mesh({"sequence": 4}), 31)


def test_the_line_of_a_scan_counts_its_shifts():
    layers = tuple(LayerSpec(mixer=mixer, mlp=None, norm=NormSpec(eps=1e-5)) for mixer in (SCAN, DELTA))
    module = tiny_decoder(layers=layers)
    scan, delta = exchange_report(module, mesh=planned_mesh({"sequence": 8}), num_tokens=32)
    # The halo is 3 tokens of 4 heads of 8 and 2 x 1 group of 6, and 4 shifts of 4 states of 8 x 6 and their decays.
    sent = 2 * (3 * (4 * 8 + 2 * 6) * 4 + 4 * 4 * (8 * 6 + 1) * 4)
    assert scan.startswith(f"exchange of 1 layer of 32 tokens: 10 shifts, {sent:,} bytes a device")
    # 3 tokens of 4 heads of 8 and 2 x 2 keys of 6, and 4 shifts of 4 states of 8 x 6 and their transitions of 6 x 6.
    sent = 2 * (3 * (4 * 8 + 4 * 6) * 4 + 4 * 4 * (8 * 6 + 6 * 6) * 4)
    assert delta.startswith(f"exchange of 1 layer of 32 tokens: 10 shifts, {sent:,} bytes a device")
    # One key a device; the groups of the scan go with its heads or stay whole.
    on_both = exchange_report(module, mesh=planned_mesh({"sequence": 8, "tensor": 2}), num_tokens=32)
    sent = 2 * (3 * (2 * 8 + 2 * 6) * 4 + 4 * 2 * (8 * 6 + 6 * 6) * 4)
    assert on_both[1].startswith(f"exchange of 1 layer of 32 tokens: 10 shifts, {sent:,} bytes a device")

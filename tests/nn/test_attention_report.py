"""The report names the kernel of each kind of layer, which is the one that the dispatch would take."""

import pytest

from dew.kernels.attention_choice import Accelerator
from dew.nn.attention_report import accelerator_named, attention_report
from dew.planning import estimate_bytes, plan_text, planned_mesh
from tests.tiny import tiny_decoder, tiny_layer


def test_each_kind_of_layer_has_a_line_with_its_kernel_and_reasons():
    module = tiny_decoder(layers=(tiny_layer(), tiny_layer(window=8), tiny_layer()), dtype="bfloat16")
    hopper = accelerator_named("cuda:9.0")
    dense, windowed = attention_report(module, num_tokens=128, device=hopper)
    assert (
        dense
        == "attention of 2 layers of 128 tokens, bfloat16: cudnn (not tpu: the device is a cuda, heads are 8 wide)"
    )
    assert windowed.startswith("attention of 1 layer of 128 tokens, window 8, bfloat16: cudnn (")
    packed = attention_report(module, num_tokens=127, packed=True, device=hopper)
    assert (
        "of 127 tokens in documents or padded, bfloat16: xla (not cudnn: documents or chunks of 1 rows need"
        in packed[0]
    )


def test_a_chunk_in_documents_is_a_window_as_long_and_rows_that_differ_have_two_lines():
    module = tiny_decoder(layers=(tiny_layer(chunk=8, window=12, head_dim=64),), dtype="bfloat16")
    plain, packed = attention_report(module, num_tokens=128, device=accelerator_named("tpu"))
    assert ", window 12, chunk 8, bfloat16: xla (" in plain
    assert "chunks of 8 with window=12" in plain
    assert packed.startswith(
        "attention of 1 layer of 128 tokens, window 12, chunk 8 in documents or padded, bfloat16: tpu"
    )


def test_a_named_kernel_that_cannot_run_is_reported_as_refused():
    line, *_ = attention_report(tiny_decoder(attention_impl="cudnn"), device=Accelerator(platform="cpu"))
    assert "refused: the attention kernel 'cudnn' cannot run this call: the device is a cpu, dtype float32" in line


def test_a_plan_says_it_for_the_devices_that_there_will_be():
    module = tiny_decoder(dtype="bfloat16")
    here = plan_text(estimate_bytes(module, planned_mesh({"fsdp": 2})))
    assert "attention of 4 layers" in here
    assert "xla (not cudnn: the device is a cpu; not tpu: the device is a cpu" in here
    there = estimate_bytes(module, planned_mesh({"fsdp": 2}), device=accelerator_named("cuda:8.0"))
    assert "bfloat16: cudnn" in plan_text(there)


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:9", "tpu:5"])
def test_an_accelerator_that_means_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"an accelerator is cpu, tpu, rocm, or cuda: .* Received: '{name}'"):
        accelerator_named(name)

"""The table of kernels decides alone: each requirement refuses a call that lacks it, with a reason of its own."""

import dataclasses
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax.sharding import PartitionSpec as P

from dew.kernels import attention_choice as choice
from dew.kernels.attention import attention, consecutive_visibility
from dew.kernels.attention_choice import KERNELS, Accelerator, AttentionCall, attention_choice, kernel_table
from dew.nn.exchange_report import exchange_report
from dew.placement import build_mesh
from dew.planning import planned_mesh
from tests.tiny import tiny_decoder

CPU, TPU = Accelerator(platform="cpu"), Accelerator(platform="tpu")
AMPERE = Accelerator(platform="cuda", capability=(8, 0), cudnn=91000)
HOPPER = dataclasses.replace(AMPERE, capability=(9, 0))
CALL = AttentionCall(
    rows=2, num_queries=1024, num_keys=1024, num_heads=8, num_kv_heads=4, head_dim=64, dtype="bfloat16"
)
UNKNOWN = "where the queries lie among the keys is known only when the program runs, or they are not consecutive"
REFUSALS = [
    ("cudnn", CPU, {}, "the device is a cpu"),
    ("cudnn", dataclasses.replace(AMPERE, capability=(7, 5)), {}, "the GPU's compute capability is 7.5"),
    ("cudnn", dataclasses.replace(AMPERE, cudnn=None), {}, "cuDNN is not installed"),
    ("cudnn", AMPERE, {"dtype": "float32"}, "dtype float32"),
    ("cudnn", AMPERE, {"head_dim": 60}, "heads are 60 wide"),
    ("cudnn", AMPERE, {"head_dim": 256}, "heads are 256 wide"),
    ("cudnn", AMPERE, {"offset": None}, UNKNOWN),
    ("cudnn", AMPERE, {"offset": 3}, "queries begin 3 slots after the keys"),
    ("cudnn", AMPERE, {"segments": True, "num_keys": 1025}, "need a mask of 4.004 MiB for 1024 queries and 1025 keys"),
    ("cudnn", AMPERE, {"chunk": 7, "num_keys": 1023, "num_queries": 1023}, "for 1023 queries and 1023 keys"),
    ("cudnn", AMPERE, {"segments": True, "rows": 1024}, "documents or chunks of 1024 rows need a mask of 2048 MiB"),
    ("cudnn", AMPERE, {"softcap": True}, "it has no softcap"),
    ("cudnn", AMPERE, {"sinks": True}, "it has no sinks"),
    ("cudnn", AMPERE, {"dropout": True}, "it has no dropout of probabilities"),
    ("tpu", Accelerator(platform="rocm"), {}, "the device is a rocm"),
    ("tpu", TPU, {"dtype": "float16"}, "dtype float16"),
    ("tpu", TPU, {"head_dim": 80}, "heads are 80 wide"),
    ("tpu", TPU, {"num_queries": 1000, "num_keys": 1000}, "1000 queries and 1000 keys"),
    ("tpu", TPU, {"offset": None}, UNKNOWN),
    ("tpu", TPU, {"offset": -128}, "1024 queries begin -128 slots after 1024 keys"),
    ("tpu", TPU, {"offset": 128}, "1024 queries begin 128 slots after 1024 keys"),
    ("tpu", TPU, {"segments": True, "num_keys": 2048}, "documents of 1024 queries and 2048 keys"),
    ("tpu", TPU, {"chunk": 256, "window": 8}, "chunks of 256 with window=8, first key in 0"),
    ("tpu", TPU, {"chunk": 256, "key_start": 128}, "chunks of 256 with window=None, first key in 128"),
    ("tpu", TPU, {"chunk": 256, "key_start": None}, "chunks of 256 with window=None, first key in None"),
    ("tpu", TPU, {"dropout": True}, "it has no dropout of probabilities"),
]


@pytest.mark.parametrize("kernel, device, changes, reason", REFUSALS)
def test_a_kernel_that_cannot_run_a_call_says_why(kernel, device, changes, reason):
    call = dataclasses.replace(CALL, **changes)
    found = attention_choice(call, "auto", device)
    assert found.kernel == "xla"
    assert any(reason in why for why in dict(found.refused)[kernel])
    with pytest.raises(ValueError, match=f"the attention kernel '{kernel}' cannot run this call") as refusal:
        attention_choice(call, kernel, device)
    assert reason in str(refusal.value)
    assert "Pass 'auto' for the fastest kernel that can, or 'xla', which runs every call." in str(refusal.value)


def test_every_requirement_of_the_table_refuses_something():
    unused = {(kernel, need.needs) for kernel, needs in KERNELS.items() for need in needs}
    for kernel, device, changes, _ in REFUSALS:
        call = dataclasses.replace(CALL, **changes)
        refusing = [need.needs for need in KERNELS[kernel] if need.refusal(call, device)]
        assert len(refusing) == 1, "a case lacks one requirement, so that its reason is the only one"
        unused.discard((kernel, refusing[0]))
    assert not unused


@pytest.mark.parametrize(
    "device, changes, kernel",
    [
        (CPU, {}, "xla"),
        (Accelerator(platform="rocm"), {}, "xla"),
        (AMPERE, {}, "cudnn"),
        (AMPERE, {"window": 100}, "cudnn"),
        (AMPERE, {"segments": True, "window": 100, "chunk": 64}, "cudnn"),
        (AMPERE, {"head_dim": 128, "dtype": "float16"}, "cudnn"),
        (HOPPER, {"head_dim": 256}, "cudnn"),
        (TPU, {}, "tpu"),
        (TPU, {"window": 100, "softcap": True, "sinks": True, "segments": True, "dtype": "float32"}, "tpu"),
        (TPU, {"chunk": 100}, "tpu"),
        (TPU, {"offset": 1024, "num_keys": 2048}, "tpu"),
    ],
)
def test_auto_takes_the_first_kernel_that_can(device, changes, kernel):
    found = attention_choice(dataclasses.replace(CALL, **changes), "auto", device)
    assert found.kernel == kernel
    assert kernel not in dict(found.refused)
    assert attention_choice(dataclasses.replace(CALL, **changes), "xla", device).kernel == "xla"


def test_a_choice_prints_the_kernel_and_the_reasons():
    text = str(attention_choice(CALL, "auto", CPU))
    assert text == "xla (not cudnn: the device is a cpu; not tpu: the device is a cpu)"
    assert str(attention_choice(dataclasses.replace(CALL, sinks=True), "auto", TPU)).startswith("tpu (not cudnn: ")


def test_a_call_is_described_by_its_operands_and_its_part_by_their_shards():
    query, key = (jnp.zeros(shape, jnp.bfloat16) for shape in [(4, 6, 8, 16), (4, 2, 9, 16)])
    visibility = consecutive_visibility(6, 9, query_start=3, window=2)
    found = AttentionCall.of(query, key, visibility, softcap=2.0)
    want = AttentionCall(
        rows=4,
        num_queries=6,
        num_keys=9,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        dtype="bfloat16",
        window=2,
        offset=3,
        softcap=True,
    )
    assert found == want
    assert found.part(2, 2) == dataclasses.replace(want, rows=2, num_heads=4, num_kv_heads=1)
    assert AttentionCall.of(query, key.astype(jnp.float32), visibility).dtype == "mixed"


def test_attention_refuses_a_kernel_of_another_device_and_an_unknown_one(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    query, pair = jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 2, 4, 8))
    visibility = consecutive_visibility(4, 4)
    for kernel in ("cudnn", "tpu"):
        with pytest.raises(
            ValueError, match=f"the attention kernel '{kernel}' cannot run this call: the device is a cpu"
        ):
            attention(query, pair, pair, visibility=visibility, scale=1.0, implementation=kernel)
    with pytest.raises(
        ValueError, match=r"must be one of 'auto', 'xla', 'cudnn', 'tpu'\. Received: implementation='flash'"
    ):
        attention(query, pair, pair, visibility=visibility, scale=1.0, implementation="flash")


@pytest.mark.parametrize(
    "platform, version, capability, want",
    [
        ("cpu", "", None, CPU),
        ("tpu", "TPU v5", None, TPU),
        ("gpu", "CUDA 13000", "9.0", HOPPER),
        ("gpu", "ROCm 6", "gfx942", Accelerator(platform="rocm")),
    ],
)
def test_the_device_is_described_by_what_jax_says_of_it(monkeypatch, platform, version, capability, want):
    class Device:
        client = type("Client", (), {"platform_version": version})

    Device.platform, Device.compute_capability = platform, capability
    monkeypatch.setattr(jax, "devices", lambda *_: [Device()])
    monkeypatch.setattr(choice, "_cudnn_version", lambda: 91000)
    assert choice.accelerator() == want


def test_the_kernel_is_that_of_the_mesh_in_context_or_of_the_default_device(monkeypatch):
    mesh, cpu = build_mesh(), jax.devices()[0]
    here = jax.devices
    monkeypatch.setattr(
        jax, "devices", lambda *names: here(*names) if any(names) else [SimpleNamespace(platform="tpu")]
    )
    assert choice.accelerator() == TPU
    assert choice.accelerator(planned_mesh({"sequence": 4})) == TPU
    assert choice.accelerator(mesh) == CPU
    with jax.set_mesh(mesh):
        assert choice.accelerator() == CPU
        seen = []
        jax.jit(lambda x: seen.append(choice.accelerator()) or x).lower(1.0)
        run = jax.shard_map(lambda x: seen.append(choice.accelerator()) or x, in_specs=P(), out_specs=P())
        jax.jit(run).lower(1.0)
        assert seen == [CPU, CPU]
    for chosen in (cpu, "cpu"):
        with jax.default_device(chosen):
            assert choice.accelerator() == CPU


def test_gpus_that_a_mesh_describes_and_that_are_not_here_have_to_be_named():
    gpus = jax.sharding.AbstractDevice(device_kind="A GPU of elsewhere", num_cores=None, platform="gpu")
    mesh = planned_mesh({"sequence": 4}).update(abstract_device=gpus)
    with pytest.raises(ValueError, match=r"'A GPU of elsewhere', and no such GPU is here.*device=accelerator_named"):
        choice.accelerator(mesh)
    module = tiny_decoder()
    with pytest.raises(ValueError, match="no such GPU is here"):
        exchange_report(module, mesh=mesh)
    assert "all_to_all" in exchange_report(module, mesh=mesh, device=HOPPER)[0]


def test_the_page_on_kernels_shows_the_table():
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
    assert kernel_table() in page.read_text()

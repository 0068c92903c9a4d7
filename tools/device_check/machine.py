"""What a machine has and moves: its devices, its memories, what compiled steps send, how fast weights arrive.

Parts: `devices`, `host_memory`, `collective_names`, `load`.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dew.kernels.attention_choice import accelerator
from dew.objectives.language import LanguageModel
from dew.placement import Layout, MeshSpec, build_mesh
from dew.pretrained import load_pretrained
from dew.training.trainer import Trainer
from tools.collectives import llama_like, step_report
from tools.device_check.parts import NotRun, Sizes, benchmark


def devices(sizes: Sizes) -> Iterator[str]:
    """Say what the machine is."""
    yield f"jax {jax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}, {accelerator()}"
    memory = jax.devices()[0].memory_stats() or {}
    limit, used = (memory.get(name, 0) / 2**30 for name in ("bytes_limit", "bytes_in_use"))
    yield f"device memory {limit:.1f} GiB, in use {used:.2f}"


def host_memory(sizes: Sizes) -> Iterator[str]:
    """Move an array to pinned host memory and back, alone and inside a program, and watch device memory."""
    device = jax.devices()[0]
    if not device.memory_stats():
        raise NotRun(f"a {device.platform} reports no device memory")
    on_device, on_host = (
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host")
    )
    x = jax.device_put(jnp.ones((2**26,), jnp.float32), on_device).block_until_ready()
    before = device.memory_stats()["bytes_in_use"]
    held = jax.device_put(x, on_host).block_until_ready()
    x.delete()
    freed = before - device.memory_stats()["bytes_in_use"]
    if freed < held.nbytes / 2:
        raise AssertionError(f"{held.nbytes} bytes on the host freed {freed} on the device")
    step = jax.jit(lambda y: jax.device_put(jax.device_put(y, on_device) + 1, on_host), out_shardings=on_host)
    after = step(held).block_until_ready()
    if after.sharding.memory_kind != "pinned_host" or float(after[0]) != 2.0:
        raise AssertionError(f"the program's result is in {after.sharding.memory_kind}, its value {after[0]}")
    yield f"{held.nbytes / 2**20:.0f} MiB moved to pinned host memory freed {freed / 2**20:.0f} MiB of the device"


def collective_names(sizes: Sizes) -> Iterator[str]:
    """Look at what a compiled step sends: gradients of split weights are reduced by reduce-scatter."""
    count = len(jax.devices())
    if count < 2:
        raise NotRun("one device sends nothing")
    module = llama_like(layers=2, width=128, heads=4, kv_heads=4, mlp=256, vocab=512, length=64, remat=None)
    layout = Layout(min_shard=1, tolerance=0)
    trainer = Trainer(LanguageModel(module), "adamw", mesh={"fsdp": count}, layout=layout)
    found = step_report(trainer, {"tokens": np.ones((2 * count, 65), np.int32)}).found
    kinds = sorted({item.kind for item in found})
    yield f"{', '.join(kinds)}"
    if jax.default_backend() == "cpu":
        raise NotRun("a CPU has no reduce-scatter")
    if "reduce-scatter" not in kinds:
        raise AssertionError("no reduce-scatter")


def load(sizes: Sizes) -> Iterator[str]:
    """Stream a checkpoint onto the devices, reading ahead, beside a plain read; every value is that of a CPU's load."""
    bench = benchmark("benchmark_load")
    with tempfile.TemporaryDirectory() as folder:
        source = bench.write_checkpoint(pathlib.Path(folder), "sharded", sizes.gigabytes)
        size = sum(path.stat().st_size for path in bench.weight_files(source))
        began = time.perf_counter()
        bench.plain_read(source)
        read = time.perf_counter() - began
        began = time.perf_counter()
        loaded = load_pretrained(source, mesh={"fsdp": len(jax.devices())})
        jax.block_until_ready(loaded.variables)
        took = time.perf_counter() - began
        here = load_pretrained(source, mesh=build_mesh(MeshSpec(), jax.devices("cpu")[:1])).variables
        for a, b in zip(jax.tree.leaves(loaded.variables), jax.tree.leaves(here), strict=True):
            if not np.array_equal(jax.device_get(a), jax.device_get(b)):
                raise AssertionError(f"a leaf of shape {a.shape} differs from the one that a CPU loaded")
    yield f"{size / 1e9:.2f} GB onto {len(jax.devices())} devices in {took:.2f} s; a plain read took {read:.2f} s"

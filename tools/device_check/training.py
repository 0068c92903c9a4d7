"""Training and generation on a device: numbers beside the CPU's, and how much of the device they use.

Parts: `one_device`, `rejected_update`, `facade`, `utilisation`, `train_speed`, `decode_speed`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dew.objectives.language import LanguageModel
from dew.placement import MeshSpec, build_mesh
from dew.planning.flops import decoder_step_flops
from dew.training.placing import plain
from dew.training.trainer import Trainer
from tools.collectives import llama_like
from tools.device_check.parts import Sizes, benchmark, differences

_HOPPER, _AMPERE = "NVIDIA H{} Tensor Core GPU Datasheet", "NVIDIA A100 Tensor Core GPU Datasheet"
_TPU = "Google Cloud documentation, TPU {}, peak compute per chip (bf16)"
PEAKS = {
    "NVIDIA H100 80GB HBM3": (989.5e12, _HOPPER.format(100)),
    "NVIDIA H200": (989.5e12, _HOPPER.format(200)),
    "NVIDIA A100-SXM4-40GB": (312e12, _AMPERE),
    "NVIDIA A100-SXM4-80GB": (312e12, _AMPERE),
    "NVIDIA A100-PCIE-40GB": (312e12, _AMPERE),
    "NVIDIA A100 80GB PCIe": (312e12, _AMPERE),
    "TPU v4": (275e12, _TPU.format("v4")),
    "TPU v5 lite": (197e12, _TPU.format("v5e")),
    "TPU v5": (459e12, _TPU.format("v5p")),
    "TPU v6 lite": (918e12, _TPU.format("v6e")),
}
"""Dense bfloat16 operations a second of a device by its kind, and where its maker says so. NVIDIA's data sheets since
Hopper print the rate with sparsity (1,979 TFLOPS); dense is half of it."""


def _small_trainer(device: Any, optimizer: str) -> Trainer:
    """Build the trainer of a small float32 decoder on a mesh of one device."""
    module = llama_like(layers=2, width=128, heads=4, kv_heads=2, mlp=256, vocab=256, length=64, remat=None)
    return Trainer(LanguageModel(module), optimizer, mesh=build_mesh(MeshSpec(), [device]))


def one_device(sizes: Sizes) -> Iterator[str]:
    """Train on a mesh of one device, here and on the host's CPU: the same losses and weights."""
    batches = [{"tokens": np.random.default_rng(seed).integers(1, 256, (8, 65)).astype(np.int32)} for seed in range(3)]
    start, found = None, []
    with jax.default_matmul_precision("highest"):
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            trainer = _small_trainer(device, "sgd")
            start = jax.device_get(trainer.place().variables) if start is None else start
            loop = trainer.loop(trainer.place(jax.tree.map(np.copy, start)))
            losses = [result.read()["loss"].value() for result in loop.run(batches)]
            found.append((losses, jax.tree.leaves(jax.device_get(loop.state.params))))
    (losses, weights), (cpu_losses, cpu_weights) = found
    off = max(differences(weights, cpu_weights, 1e-4, "weights beside the CPU's"))
    if not np.allclose(losses, cpu_losses, rtol=1e-5):
        raise AssertionError(f"losses {losses}, on the CPU {cpu_losses}")
    yield f"losses {', '.join(f'{loss:.5f}' for loss in losses)}; weights differ from the CPU's by {off:.1e}"


def rejected_update(sizes: Sizes) -> Iterator[str]:
    """Run the conditional of the update both ways: a batch without a scored token changes no bit, the next one does."""
    trainer = _small_trainer(jax.devices()[0], "adamw")
    loop = trainer.loop(trainer.place())
    tokens = np.random.default_rng(0).integers(1, 256, (8, 65)).astype(np.int32)
    changed = []
    for scored in (True, False, True):
        before = jax.tree.leaves(jax.device_get((loop.state.params, loop.state.opt_state)))
        loop.step({"tokens": tokens, "loss_mask": np.full(tokens.shape, scored)}).read()
        after = jax.tree.leaves(jax.device_get((loop.state.params, loop.state.opt_state)))
        changed.append(any(not np.array_equal(a, b) for a, b in zip(after, before, strict=True)))
    if changed != [True, False, True]:
        raise AssertionError(f"changed {changed} by batches with, without and with scored tokens")
    yield "an update that is rejected leaves weights and moments as they were"


def facade(sizes: Sizes) -> Iterator[str]:
    """Fit, generate and fit again through `dew_keras`; the second call of generate repeats the first before a step."""
    import dew_keras

    module = llama_like(layers=2, width=128, heads=2, kv_heads=1, mlp=256, vocab=256, length=256, remat=None)
    model = dew_keras.Model(module.clone(dtype="bfloat16"))
    model.compile(optimizer="adamw", mesh={"fsdp": len(jax.devices())})
    batch = 8 * len(jax.devices())
    rows = np.random.default_rng(0).integers(1, 256, (batch, 129)).astype(np.int32)
    losses = model.fit(rows, batch_size=batch, epochs=2, verbose=0).history["loss"]
    first, second = (model.generate([[1, 2, 3]], max_new_tokens=8, stop_token_ids=[]) for _ in range(2))
    if not np.all(np.isfinite(losses)) or not np.array_equal(first[0], second[0]):
        raise AssertionError(f"losses {losses}, tokens {first} and {second}")
    losses += model.fit(rows, batch_size=batch, epochs=1, verbose=0).history["loss"]
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss did not fall: {losses}")
    yield f"losses {', '.join(f'{loss:.4f}' for loss in losses)}; tokens {list(map(int, first[0]))}"


def utilisation(sizes: Sizes) -> Iterator[str]:
    """Time a bfloat16 step and say how many of the operations that it needs that makes a second."""
    rows, width = 4, sizes.width
    shape = {"layers": 8, "width": width, "heads": width // 16, "kv_heads": width // 16, "mlp": 4 * width}
    if width >= 1024:
        shape |= {"heads": width // 128, "kv_heads": width // 256}
    module = llama_like(**shape, vocab=16 * width, length=sizes.length, remat=None)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1])
    trainer = Trainer(LanguageModel(module.clone(dtype="bfloat16")), "adamw", mesh=mesh)
    needed = decoder_step_flops(module, plain(trainer.abstract_variables()), rows=rows, length=sizes.length)
    loop, seconds = trainer.loop(trainer.place()), []
    tokens = np.random.default_rng(0).integers(1, 16 * width, (rows, sizes.length + 1)).astype(np.int32)
    for _ in range(2 + sizes.samples):
        began = time.perf_counter()
        loop.step({"tokens": tokens}).read()
        seconds.append(time.perf_counter() - began)
    rate = needed / float(np.median(seconds[2:]))
    yield f"{needed / 1e12:.3g} TFLOP a step, {rate / 1e12:.3g} TFLOP a second: {_share(rate)}"


def _share(rate: float) -> str:
    """Say which part of the device's peak a rate is."""
    kind = jax.devices()[0].device_kind
    if kind not in PEAKS:
        return f"the peak of a {kind} is not known here"
    peak, source = PEAKS[kind]
    return f"{rate / peak:.1%} of {peak / 1e12:.0f} ({source})"


def train_speed(sizes: Sizes) -> Iterator[str]:
    """Time a training step beside the handwritten one."""
    bench = benchmark("benchmark_train")
    shape = {"layers": sizes.layers, "vocab": sizes.vocab, "rows": sizes.rows[-1]}
    ratio = bench.compare(bench.Options(**shape, samples=sizes.samples))
    yield f"a step takes {ratio:.3f} times the handwritten one's"


def decode_speed(sizes: Sizes) -> Iterator[str]:
    """Time greedy generation beside the handwritten loop."""
    bench = benchmark("benchmark_generate")
    shape = {"layers": sizes.layers, "vocab": sizes.vocab, "rows": sizes.rows}
    ratios = bench.ratios(bench.Options(**shape, samples=sizes.samples))
    yield f"tokens per second over the handwritten loop's: {', '.join(f'{ratio:.3f}' for ratio in ratios)}"

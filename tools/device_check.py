"""Check on a device what no CPU can check: `python tools/device_check.py`, under ten minutes on one GPU.

Each part prints what it found and ends as ok, FAILED or "not run: reason". On a CPU everything runs on tiny sizes, and
the parts that need a device say so. Exits with 1 where a part failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

TOOLS = pathlib.Path(__file__).resolve().parent
BUDGET_SECONDS = 540.0
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest difference from float32 over the largest value."""
KERNEL_NAMES = {"cudnn": "__cudnn$fmha", "tpu": "tpu_custom_call"}
"""What a compiled program calls where the kernel runs."""


class NotRun(Exception):  # noqa: N818 - it is no error
    """A part cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the parts are.

    Attributes:
        length: Tokens of a row in the kernels' part.
        layers: Layers of the models that are timed.
        vocab: Their vocabulary.
        gigabytes: Size of the checkpoint that is loaded.
        samples: Timed samples.
        width: Width of the model whose use of the device is measured.
    """

    length: int
    layers: int
    vocab: int
    gigabytes: float
    samples: int
    width: int


FULL = Sizes(length=2048, layers=30, vocab=49152, gigabytes=2.0, samples=5, width=2048)
TINY = Sizes(length=640, layers=2, vocab=256, gigabytes=0.02, samples=1, width=32)
PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 4080": 97e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 operations a second of a device whose kind contains the name, from the makers' data sheets."""


def tool(name: str) -> Any:
    """Import a neighbour of this file."""
    if str(TOOLS) not in sys.path:
        sys.path.insert(0, str(TOOLS))
    return importlib.import_module(name)


def devices(sizes: Sizes) -> Iterator[str]:
    """Say what the machine is."""
    import jax

    from dew.kernels.attention_choice import accelerator

    yield f"jax {jax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}, {accelerator()}"
    memory = jax.devices()[0].memory_stats() or {}
    limit, used = (memory.get(name, 0) / 2**30 for name in ("bytes_limit", "bytes_in_use"))
    yield f"device memory {limit:.1f} GiB, in use {used:.2f}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of attention, for values and for the choice."""

    name: str
    dtype: str = "bfloat16"
    head_dim: int = 64
    value_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    packed: bool = False
    softcap: float | None = None
    sinks: bool = False


CASES = (
    Case("causal"),
    Case("causal, wide heads", head_dim=128),
    Case("causal, heads of 256", head_dim=256),
    Case("causal, float16", dtype="float16"),
    Case("causal, float32", dtype="float32"),
    Case("window", window=100),
    Case("documents", packed=True),
    Case("documents and window", packed=True, window=100),
    Case("chunks", chunk=100),
    Case("softcap", softcap=20.0),
    Case("sinks", sinks=True),
    Case("narrower values", head_dim=128, value_dim=64),
)


def _call(case: Case, length: int) -> tuple[tuple[Any, ...], Any, Any, Any]:
    """Draw operands; give them with the visibility, the sinks and the description of the call."""
    import jax
    import jax.numpy as jnp

    from dew.kernels.attention import consecutive_visibility
    from dew.kernels.attention_choice import AttentionCall

    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (2, length, 8, case.head_dim), case.dtype)
    widths = case.head_dim, case.value_dim or case.head_dim
    key, value = (
        jax.random.normal(k, (2, 4, length, width), case.dtype) for k, width in zip(keys[1:3], widths, strict=True)
    )
    segments = jnp.sort(jax.random.randint(keys[3], (2, length), 1, 6), axis=1) if case.packed else None
    visibility = consecutive_visibility(
        length, length, query_segments=segments, key_segments=segments, window=case.window, chunk=case.chunk
    )
    sinks = jnp.linspace(-1.0, 2.0, 8) if case.sinks else None
    call = AttentionCall.of(query, key, visibility, case.softcap, sinks, value_dim=widths[1])
    return (query, key, value), visibility, sinks, call


def _gradient(case: Case, visibility: Any, sinks: Any, implementation: str) -> Callable[..., Any]:
    """Compile-ready function of (query, key, value): the mixed values and the three gradients."""
    import jax
    import jax.numpy as jnp

    from dew.kernels.attention import attention

    def loss(*heads: Any) -> tuple[Any, Any]:
        mixed = attention(
            *heads,
            visibility=visibility,
            scale=case.head_dim**-0.5,
            softcap=case.softcap,
            sinks=sinks,
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(mixed.astype(jnp.float32))), mixed

    def run(*heads: Any) -> tuple[Any, ...]:
        gradients, mixed = jax.grad(loss, (0, 1, 2), has_aux=True)(*heads)
        return mixed, *gradients

    return jax.jit(run)


def kernels(sizes: Sizes) -> Iterator[str]:
    """Compare the chosen kernel's values and gradients with the XLA path in float32, and look for it in the program."""
    import jax
    import jax.numpy as jnp

    from dew.kernels.attention_choice import attention_choice

    for case in CASES:
        heads, visibility, sinks, call = _call(case, sizes.length)
        choice = attention_choice(call)
        wide = tuple(x.astype(jnp.float32) for x in heads)
        # Without it a GPU multiplies float32 in fewer bits.
        with jax.default_matmul_precision("highest"):
            program = _gradient(case, visibility, sinks, "auto").lower(*heads).compile()
            want = _gradient(case, visibility, sinks, "xla")(*wide)
        called = [kernel for kernel, name in KERNEL_NAMES.items() if name in program.as_text()]
        if called != ([] if choice.kernel == "xla" else [choice.kernel]):
            raise AssertionError(f"{case.name}: the table chose {choice}, the program calls {called or 'no kernel'}")
        errors = _worst(program(*heads), want)
        if not max(errors) < TOLERANCE[case.dtype]:
            raise AssertionError(f"{case.name} by {choice.kernel}: {errors} of the largest value, {TOLERANCE} allowed")
        yield f"{case.name}, {case.dtype}: {choice}; values {errors[0]:.1e}, gradients {max(errors[1:]):.1e}"


def _worst(got: Any, want: Any) -> list[float]:
    """Largest differences of arrays, each over the largest value wanted."""
    import jax.numpy as jnp

    wide = [(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)) for a, b in zip(got, want, strict=True)]
    return [float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in wide]


def blocks(sizes: Sizes) -> Iterator[str]:
    """Compare XLA's attention in blocks with the one that keeps all logits, both in float32."""
    import jax

    from dew.kernels import attention_xla

    for case in (dataclasses.replace(case, dtype="float32") for case in CASES if case.head_dim == 64):
        heads, visibility, sinks, _ = _call(case, sizes.length)
        found = []
        for queries in (0, sizes.length):
            usual, attention_xla.DENSE_QUERIES = attention_xla.DENSE_QUERIES, queries
            try:
                with jax.default_matmul_precision("highest"):
                    found.append(_gradient(case, visibility, sinks, "xla")(*heads))
            finally:
                attention_xla.DENSE_QUERIES = usual
        errors = _worst(*found)
        if not max(errors) < TOLERANCE["float32"]:
            raise AssertionError(f"{case.name}: {errors} of the largest value, {TOLERANCE['float32']} allowed")
        yield f"{case.name}: values {errors[0]:.1e}, gradients {max(errors[1:]):.1e}"


def grouped_products(sizes: Sizes) -> Iterator[str]:
    """Compare the products of sorted rows with a product per group, values and gradients, and time both forms."""
    import jax
    import jax.numpy as jnp

    from dew.kernels.grouped_matmul import grouped_matmul

    keys, groups = jax.random.split(jax.random.key(0), 3), 8
    counts = jnp.asarray([sizes.length // 4, 0, 1, sizes.length // 2, 7, sizes.length // 8, 3, 5], jnp.int32)
    rows = jax.random.normal(keys[0], (sizes.length, 4 * sizes.width), "bfloat16")
    banks = jax.random.normal(keys[1], (groups, 4 * sizes.width, 2 * sizes.width), "bfloat16") / sizes.width**0.5
    group = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(sizes.length), side="right")
    mask = jax.nn.one_hot(group, groups, dtype=jnp.float32)

    def gradients(product: Callable[..., Any], *operands: Any) -> Any:
        def loss(*operands: Any) -> tuple[Any, Any]:
            out = product(*operands)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        by_operands, out = jax.grad(loss, (0, 1), has_aux=True)(*operands)
        return out, *by_operands

    def by_group(rows: Any, banks: Any) -> Any:
        return sum((rows @ banks[number]) * mask[:, number : number + 1] for number in range(groups))

    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(gradients, by_group))(rows.astype("float32"), banks.astype("float32"))
    for implementation in ("blocks", "ragged"):
        product = functools.partial(grouped_matmul, sizes=counts, implementation=implementation)
        run = jax.jit(functools.partial(gradients, product))
        errors = _worst(jax.block_until_ready(run(rows, banks)), want)
        if not max(errors) < TOLERANCE["bfloat16"]:
            raise AssertionError(f"{implementation}: {errors} of the largest value")
        began = time.perf_counter()
        jax.block_until_ready([run(rows, banks) for _ in range(sizes.samples)])
        took = (time.perf_counter() - began) / sizes.samples
        yield f"{implementation}: values {errors[0]:.1e}, gradients {max(errors[1:]):.1e}, {1e3 * took:.2f} ms"


def _small_trainer(device: Any, optimizer: str) -> Any:
    """Build the trainer of a small float32 decoder on a mesh of one device."""
    from dew.objectives.language import LanguageModel
    from dew.placement import MeshSpec, build_mesh
    from dew.training.trainer import Trainer

    module = tool("collectives").llama_like(
        layers=2, width=128, heads=4, kv_heads=2, mlp=256, vocab=256, length=64, remat=None
    )
    return Trainer(LanguageModel(module), optimizer, mesh=build_mesh(MeshSpec(), [device]))


def one_device(sizes: Sizes) -> Iterator[str]:
    """Train on a mesh of one device, here and on the host's CPU: the same losses and weights."""
    import jax

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
    error = max(_worst(weights, cpu_weights))
    if not np.allclose(losses, cpu_losses, rtol=1e-5) or not error < 1e-4:
        raise AssertionError(f"losses {losses}, on the CPU {cpu_losses}; weights differ by {error}")
    yield f"losses {', '.join(f'{loss:.5f}' for loss in losses)}; weights differ from the CPU's by {error:.1e}"


def rejected_update(sizes: Sizes) -> Iterator[str]:
    """Run the conditional of the update both ways: a batch without a scored token changes no bit, the next one does."""
    import jax

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


def utilisation(sizes: Sizes) -> Iterator[str]:
    """Time a bfloat16 step with recomputation and say how many of the operations it needs that makes a second."""
    import jax

    from dew.objectives.language import LanguageModel
    from dew.placement import MeshSpec, build_mesh
    from dew.planning.flops import decoder_step_flops
    from dew.training.placing import plain
    from dew.training.trainer import Trainer

    rows, width = 4, sizes.width
    shape = {"layers": 8, "width": width, "heads": width // 16, "kv_heads": width // 16, "mlp": 4 * width}
    if width >= 1024:
        shape |= {"heads": width // 128, "kv_heads": width // 256}
    module = tool("collectives").llama_like(**shape, vocab=16 * width, length=sizes.length, remat=None)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1])
    trainer = Trainer(LanguageModel(module.clone(dtype="bfloat16")), "adamw", mesh=mesh)
    needed = decoder_step_flops(module, plain(trainer.abstract_variables()), rows=rows, length=sizes.length)
    loop, seconds = trainer.loop(trainer.place()), []
    tokens = np.random.default_rng(0).integers(1, 16 * width, (rows, sizes.length + 1)).astype(np.int32)
    for _ in range(2 + sizes.samples):
        began = time.perf_counter()
        loop.step({"tokens": tokens}).read()
        seconds.append(time.perf_counter() - began)
    rate, kind = needed / float(np.median(seconds[2:])), jax.devices()[0].device_kind
    peak = next((value for name, value in PEAKS.items() if name in kind), None)
    share = f"{rate / peak:.1%} of {peak / 1e12:.0f}" if peak else f"the peak of a {kind} is not known here"
    yield f"{needed / 1e12:.3g} TFLOP a step, {rate / 1e12:.3g} TFLOP a second: {share}"


def kernel_speed(sizes: Sizes) -> Iterator[str]:
    """Time the chosen kernel beside XLA's."""
    import jax

    from dew.kernels.attention_choice import attention_choice

    if attention_choice(_call(CASES[0], sizes.length)[3]).kernel == "xla":
        raise NotRun("the table chooses XLA here: there is nothing to compare")
    for case in (CASES[0], CASES[5], CASES[6]):
        heads, visibility, sinks, _ = _call(case, 2 * sizes.length)
        seconds = {}
        for implementation in ("auto", "xla"):
            run = _gradient(case, visibility, sinks, implementation)
            jax.block_until_ready(run(*heads))
            began = time.perf_counter()
            for _ in range(10):
                result = run(*heads)
            jax.block_until_ready(result)
            seconds[implementation] = (time.perf_counter() - began) / 10
        yield f"{case.name}, {2 * sizes.length} tokens, forward and backward: " + ", ".join(
            f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items()
        )


def load(sizes: Sizes) -> Iterator[str]:
    """Stream a checkpoint onto the devices, reading ahead, beside a plain read; every value is that of a CPU's load."""
    import jax

    from dew.placement import MeshSpec, build_mesh
    from dew.pretrained import load_pretrained

    bench = tool("benchmark_load")
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


def facade(sizes: Sizes) -> Iterator[str]:
    """Fit, generate and fit again through `dew_keras`; the second call of generate repeats the first before a step."""
    import jax

    import dew_keras

    module = tool("collectives").llama_like(
        layers=2, width=128, heads=2, kv_heads=1, mlp=256, vocab=256, length=256, remat=None
    )
    model = dew_keras.Model(module.clone(dtype="bfloat16"))
    model.compile(optimizer="adamw", mesh={"fsdp": len(jax.devices())})
    rows = np.random.default_rng(0).integers(1, 256, (8 * len(jax.devices()), 129)).astype(np.int32)
    losses = model.fit(rows, batch_size=8 * len(jax.devices()), epochs=2, verbose=0).history["loss"]
    first, second = (model.generate([[1, 2, 3]], max_new_tokens=8, stop_token_ids=[]) for _ in range(2))
    if not np.all(np.isfinite(losses)) or not np.array_equal(first[0], second[0]):
        raise AssertionError(f"losses {losses}, tokens {first} and {second}")
    losses += model.fit(rows, batch_size=8 * len(jax.devices()), epochs=1, verbose=0).history["loss"]
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss did not fall: {losses}")
    yield f"losses {', '.join(f'{loss:.4f}' for loss in losses)}; tokens {list(map(int, first[0]))}"


def host_memory(sizes: Sizes) -> Iterator[str]:
    """Move an array to pinned host memory and back, alone and inside a program, and watch device memory."""
    import jax
    import jax.numpy as jnp

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
    import jax

    from dew.objectives.language import LanguageModel
    from dew.placement import Layout
    from dew.training.trainer import Trainer

    count = len(jax.devices())
    if count < 2:
        raise NotRun("one device sends nothing")
    report = tool("collectives")
    module = report.llama_like(layers=2, width=128, heads=4, kv_heads=4, mlp=256, vocab=512, length=64, remat=None)
    layout = Layout(min_shard=1, tolerance=0)
    trainer = Trainer(LanguageModel(module), "adamw", mesh={"fsdp": count}, layout=layout)
    found = report.step_report(trainer, {"tokens": np.ones((2 * count, 65), np.int32)}).found
    kinds = sorted({item.kind for item in found})
    yield f"{', '.join(kinds)}"
    if jax.default_backend() == "cpu":
        raise NotRun("a CPU has no reduce-scatter")
    if "reduce-scatter" not in kinds:
        raise AssertionError("no reduce-scatter")


def train_speed(sizes: Sizes) -> Iterator[str]:
    """Time a training step beside the handwritten one."""
    bench = tool("benchmark_train")
    ratio = bench.main(bench.Options(layers=sizes.layers, vocab=sizes.vocab, samples=sizes.samples))
    yield f"a step takes {ratio:.3f} times the handwritten one's"


def decode_speed(sizes: Sizes) -> Iterator[str]:
    """Time greedy generation beside the handwritten loop."""
    bench = tool("benchmark_generate")
    ratios = bench.main(bench.Options(layers=sizes.layers, vocab=sizes.vocab, samples=sizes.samples))
    yield f"tokens per second over the handwritten loop's: {', '.join(f'{ratio:.3f}' for ratio in ratios)}"


PARTS: dict[str, Callable[[Sizes], Iterator[str]]] = {
    "devices": devices,
    "kernels": kernels,
    "blocks": blocks,
    "grouped": grouped_products,
    "one device": one_device,
    "rejected update": rejected_update,
    "kernel speed": kernel_speed,
    "facade": facade,
    "host memory": host_memory,
    "collectives": collective_names,
    "load": load,
    "utilisation": utilisation,
    "train speed": train_speed,
    "decode speed": decode_speed,
}


def check(parts: dict[str, Callable[[Sizes], Iterator[str]]], sizes: Sizes, budget: float) -> dict[str, str]:
    """Run parts one after another and print what they find.

    Args:
        parts: Name to part.
        sizes: How large they are.
        budget: Seconds after which no further part begins.

    Returns:
        Name to "ok", "FAILED: reason" or "not run: reason".
    """
    began, results = time.perf_counter(), {}
    for name, part in parts.items():
        start = time.perf_counter()
        if start - began >= budget:
            results[name] = f"not run: {budget:.0f} s were used"
        else:
            print(f"== {name}", flush=True)
            results[name] = _ended(functools.partial(part, sizes))
        print(f"== {name}: {results[name]} ({time.perf_counter() - start:.1f} s)\n", flush=True)
    print("\n".join(f"{name:15}  {result}" for name, result in results.items()))
    return results


def _ended(part: Callable[[], Iterator[str]]) -> str:
    """Run one part to its end, whatever that is."""
    try:
        for line in part():
            print(f"   {line}", flush=True)
    except NotRun as reason:
        return f"not run: {reason}"
    except Exception as error:
        traceback.print_exc()
        return f"FAILED: {type(error).__name__}: {error}"
    return "ok"


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds after which no part begins")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as on a CPU")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(TOOLS.parent))
    import jax

    tiny = options.tiny or jax.default_backend() == "cpu"
    results = check({name: PARTS[name] for name in options.parts}, TINY if tiny else FULL, options.budget)
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())

"""The exchanges of attention over split positions beside one device: milliseconds, bytes sent, temporaries.

Run `python -m tools.benchmark_sequence` (its mesh is simulated where the platform is CPU). Each line is the forward and
backward pass of one attention call. Bytes are what a device sends, from the compiled program. On simulated devices the
milliseconds are the work of all devices together and say nothing of a network.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from typing import Any

KINDS = {"causal": (None, ("all_to_all", "gather", "ring")), "window": (1, ("all_to_all", "gather", "ring", "banded"))}


def program(options: argparse.Namespace, window: int | None, path: str | None) -> tuple[Any, Any]:
    """Compile one call.

    Args:
        options: Sizes of the call.
        window: How many tokens a token reads; None means all before it.
        path: The exchange; None means one device.

    Returns:
        The compiled program and its operands.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from dew.kernels.attention import attention
    from dew.nn.masks import causal_visibility, limited
    from dew.parallel.exchange import KEY_NAMES, QUERY_NAMES, sequence_attention
    from dew.placement.mesh import MeshSpec, build_mesh
    from dew.placement.rules import resolve

    shards = 1 if path is None else options.shards
    mesh = build_mesh(MeshSpec(sequence=shards), jax.devices()[:shards])

    def local(query, key, value, **facts):
        return attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2), **facts)

    attend = local if path is None else functools.partial(sequence_attention, sequence_impl=path)

    def loss(query, key, value):
        visibility = limited(causal_visibility(options.length), window=window, chunk=None)
        return jnp.sum(attend(query, key, value, visibility=visibility, scale=options.width**-0.5) ** 2)

    operands = []
    for seed, (heads, names) in enumerate(
        ((options.heads, QUERY_NAMES), (options.kv_heads, KEY_NAMES), (options.kv_heads, KEY_NAMES))
    ):
        x = jax.random.normal(jax.random.key(seed), (options.rows, options.length, heads, options.width))
        operands.append(jax.device_put(x, NamedSharding(mesh, resolve(names, x.shape, mesh).spec)))
    places = tuple(x.sharding for x in operands)
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=places).lower(*operands).compile(), operands


def sent_bytes(compiled: Any, shards: int) -> int:
    """Add up what a device sends over the sequence axis.

    Args:
        compiled: A program of `program`.
        shards: Devices of the axis.
    """
    from dew.parallel.traffic import Transfer
    from tools.collectives import collectives

    mesh = {"data": 1, "expert": 1, "fsdp": 1, "tensor": 1, "sequence": shards, "stage": 1}
    found = collectives(compiled.as_text(), mesh)
    # A permute without axes sends each device its own.
    found = [item for item in found if item.kind != "all-reduce" and "sequence" in item.axes]
    return sum(Transfer(kind=item.kind, result_bytes=item.step_bytes, shards=shards).sent_bytes for item in found)


def table(options: argparse.Namespace) -> list[str]:
    """Measure every call, interleaved, and write a Markdown table.

    Args:
        options: Sizes of the call, and how many samples.
    """
    import jax

    runs = {}
    for kind, (local, paths) in KINDS.items():
        window = None if local is None else options.window
        for path in (None, *paths):
            runs[kind, path] = program(options, window, path)
            jax.block_until_ready(runs[kind, path][0](*runs[kind, path][1]))
    samples: dict[Any, list[float]] = {run: [] for run in runs}
    for _ in range(options.samples):
        for run, (compiled, operands) in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled(*operands))
            samples[run].append(1e3 * (time.perf_counter() - start))
    lines = [
        "| call | exchange | ms | min | max | sent KiB a device | temporaries MiB a device |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, path), (compiled, _) in runs.items():
        times = samples[kind, path]
        sent = 0 if path is None else sent_bytes(compiled, options.shards)
        temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**20
        call = f"window {options.window}" if kind == "window" else kind
        numbers = f"{statistics.median(times):.0f} | {min(times):.0f} | {max(times):.0f} | {sent / 2**10:,.0f}"
        lines.append(f"| {call} | {path or 'one device'} | {numbers} | {temporaries:.1f} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"shards": 8, "length": 2048, "heads": 8, "kv-heads": 2, "width": 64, "rows": 1, "window": 256}
    for name, default in {**sizes, "samples": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    if "jax" not in sys.modules:
        os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={options.shards}")
    print("\n".join(table(options)))


if __name__ == "__main__":
    main()

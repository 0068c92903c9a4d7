"""Time, bytes and temporaries of the ways to compute experts: `python tools/benchmark_moe.py`.

One layer, loss and gradients. On one device the grouped products in blocks stand beside XLA's own and beside all
experts for every token; on eight simulated devices the exchange stands beside experts gathered from fsdp, at an even
and at a skewed routing. Times are medians of repeats with their quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from flax import linen as nn

from dew.kernels import expert_mixture
from dew.nn.moe import Experts, ExpertsSpec
from dew.nn.router import RouterSpec, choose
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from tools.collectives import collectives

HEADER = """| devices | form | routing | ms (quartiles) | MiB of collectives on one device | MiB of temporaries |
| --- | --- | --- | --- | --- | --- |"""
CAPACITY = 1.25
"""Of the form that drops tokens: slots of a row that an expert takes, over an even share."""
SKEW = 4.0
"""Added to the logits of the experts of the first device: nearly every token chooses among them."""


def inputs(rows: int, length: int, width: int, spec: ExpertsSpec, *, skewed: bool) -> tuple[Any, Any, jax.Array]:
    """Build a layer, its weights and tokens.

    Args:
        rows: Rows.
        length: Tokens of a row.
        width: Model width.
        spec: The experts.
        skewed: Whether the first quarter of the experts is preferred.
    """
    module = Experts(width, spec)
    x = jax.random.normal(jax.random.key(1), (rows, length, width))
    params = nn.unbox(module.init(jax.random.key(0), x[:1, :1]))["params"]
    kernel = jax.random.normal(jax.random.key(2), params["router"]["kernel"].shape) / width**0.5
    preferred = jnp.arange(spec.num_experts) < spec.num_experts // 4
    router = {"kernel": kernel, "bias": jnp.where(preferred & skewed, SKEW, 0.0)}
    return module, {**params, "router": router}, x


def every_expert(params: Any, x: jax.Array, spec: ExpertsSpec) -> jax.Array:
    """Compute all experts for all tokens and weigh them: the form without a dispatch.

    Args:
        params: Weights of the layer.
        x: Tokens.
        spec: The experts.
    """
    flat, banks = x.reshape(-1, x.shape[-1]), params["experts"]
    choice = choose(flat @ params["router"]["kernel"] + params["router"]["bias"], None, spec.router)
    weights = jnp.sum(jax.nn.one_hot(choice.experts, spec.num_experts) * choice.weights[..., None], axis=1)
    hidden = jax.nn.silu(jnp.einsum("ND,EDF->ENF", flat, banks["gate_proj"]))
    hidden = hidden * jnp.einsum("ND,EDF->ENF", flat, banks["up_proj"])
    return jnp.einsum("ENF,EFD,NE->ND", hidden, banks["down_proj"], weights)


def measured(function: Callable[..., jax.Array], params: Any, x: jax.Array, mesh: Any, repeats: int) -> str:
    """Compile, count and time a loss with its gradients; a row of the table.

    Args:
        function: Weights and tokens to outputs.
        params: Weights.
        x: Tokens.
        mesh: Where it runs.
        repeats: Timed runs.
    """
    loss = lambda params, x: jnp.sum(function(params, x) ** 2)  # noqa: E731
    with jax.set_mesh(mesh), nn.logical_axis_rules(Layout().rules):
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()
        jax.block_until_ready(compiled(params, x))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(compiled(params, x))
            times.append((time.perf_counter() - start) * 1e3)
    low, middle, high = statistics.quantiles(times, n=4)
    found = collectives(compiled.as_text(), dict(mesh.shape))
    known = sum(each.step_bytes for each in found if None not in each.trips)
    looped = sum(each.bytes for each in found if None in each.trips)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    extra = f" + {looped / 2**20:.1f} a further share" if looped else ""
    return f"{middle:.0f} ({low:.0f}-{high:.0f}) | {known / 2**20:.1f}{extra} | {temporaries / 2**20:.1f}"


def placed(params: Any, x: jax.Array, spec: MeshSpec) -> tuple[Any, Any, jax.Array]:
    """Place weights and tokens as a trainer would.

    Args:
        params: Weights.
        x: Tokens.
        spec: The mesh.
    """
    mesh = build_mesh(spec)
    split = "expert" if spec.expert > 1 else None
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    banks = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(split, None if split else "fsdp"))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "expert", "fsdp")))
    put = {name: jax.device_put(tree, banks if name == "experts" else whole) for name, tree in params.items()}
    return mesh, put, jax.device_put(x, rows)


@contextlib.contextmanager
def grouped(implementation: str) -> Iterator[None]:
    """Have experts compute their grouped products in one way.

    Args:
        implementation: As `dew.kernels.grouped_matmul.grouped_matmul` names it.
    """
    own = expert_mixture.grouped_matmul
    expert_mixture.grouped_matmul = functools.partial(own, implementation=implementation)
    try:
        yield
    finally:
        expert_mixture.grouped_matmul = own


def rows(options: argparse.Namespace, *, skewed: bool) -> Iterator[str]:
    """Measure each form at one routing; a row of the table each.

    Args:
        options: Sizes and repeats.
        skewed: Whether the first quarter of the experts is preferred.
    """
    router = RouterSpec(top_k=options.top_k, normalise=True, bias=True)
    spec = ExpertsSpec(num_experts=options.experts, features=options.features, router=router)
    module, params, x = inputs(options.rows, options.length, options.width, spec, skewed=skewed)
    alone = build_mesh(MeshSpec(), jax.devices()[:1])

    def row(form: str, function: Callable[..., jax.Array], mesh: Any = alone, params: Any = params, x: Any = x) -> str:
        cells = measured(function, params, x, mesh, options.repeats)
        return f"| {mesh.size} | {form} | {'skewed' if skewed else 'even'} | {cells} |"

    apply = lambda params, x: module.apply({"params": params}, x)[0]  # noqa: E731
    capped = Experts(options.width, dataclasses.replace(spec, capacity_factor=CAPACITY))
    with grouped("blocks"):
        yield row("grouped products, blocks", apply)
        yield row(f"capacity_factor={CAPACITY}", lambda params, x: capped.apply({"params": params}, x)[0])
    with grouped("ragged"):
        yield row("grouped products, ragged", apply)
    yield row("every expert", lambda params, x: every_expert(params, x, spec))
    for form, mesh_spec in (("fsdp=8, gathered", MeshSpec(fsdp=8)), ("expert=4, exchange", MeshSpec(expert=4))):
        yield row(form, apply, *placed(params, x, mesh_spec))


def main(arguments: list[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 8), ("length", 256), ("width", 256), ("features", 256), ("experts", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    print(f"JAX {jax.__version__}, {jax.default_backend()}; {vars(options)}")
    print(HEADER)
    for skewed in (False, True):
        for row in rows(options, skewed=skewed):
            print(row, flush=True)


if __name__ == "__main__":
    main()

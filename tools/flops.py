"""What each device computes in a training step: operations of its matrix products beside an even split of one device's.

Run `python -m tools.flops --mesh fsdp=2,tensor=4 --layers 4`. Both programs are compiled as the trainer compiles them
and read from their optimised HLO, loops times their trip counts; nothing is run. Loops whose length the routing decides
count as at an even one: experts compute whole blocks of rows (`StepFlops.blocks`), and no share follows the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from dew.nn.attention import AttentionSpec
from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.moe import ExpertsSpec
from dew.parallel.choice import checked_sequence_implementation
from dew.planning.flops import Product, matrix_products
from tools.collectives import llama_like

MIXERS = ("attention", "mamba2", "gated_delta_net")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The matrix products of one compiled step.

    Attributes:
        devices: Devices of the mesh.
        vocab_size: Rows of the token table.
        products: The products of one device.
        experts: Experts of a device in each layer that has them; 0 without.
        expert_rows: Rows of each of them at an even routing, every time they run.
        expert_weight: Elements of one matrix of an expert on a device.
    """

    devices: int
    vocab_size: int
    products: tuple[Product, ...]
    experts: int = 0
    expert_rows: float = 0.0
    expert_weight: int = 1

    @property
    def per_device(self) -> int:
        """Operations of one device."""
        return sum(map(self.flops, self.products))

    def blocks(self, rows: int) -> int:
        """Count the blocks of so many rows that a device's experts compute: each fills its last one up."""
        return self.experts * math.ceil(self.expert_rows / rows)

    def flops(self, product: Product) -> int:
        """Count the operations of one product, experts at an even routing."""
        unknown = product.trips.count(None)
        if unknown == 0:
            return product.flops
        # Around the loop over blocks, or a weighted sum: the loop over the shares that follow the first.
        if unknown > 1 or _is_weighted_sum(product):
            return 0
        rows, rest = divmod(math.prod(product.shape) * product.contracted, self.expert_weight)
        if self.experts == 0 or rest:
            raise ValueError(f"{product} is in a loop whose length nothing tells.")
        return product.flops * self.blocks(rows)

    def by_part(self) -> dict[str, int]:
        """Operations of one device by the part of the model they belong to."""
        parts: dict[str, int] = {}
        for product in self.products:
            name = part_of(product, self.vocab_size)
            parts[name] = parts.get(name, 0) + self.flops(product)
        return parts


def step_flops(trainer: Any, batch: Mapping[str, Any]) -> StepFlops:
    """Compile a trainer's step for a batch's shapes and read its matrix products.

    Args:
        trainer: A `dew.Trainer`.
        batch: One host batch as its objective reads it.
    """
    text = trainer.lower(batch).compile().as_text()
    module, mesh = trainer.objective.module, trainer.mesh
    rows, length = np.shape(batch["tokens"])
    experts = next((layer.mlp for layer in module.layers if isinstance(layer.mlp, ExpertsSpec)), None)
    routed: dict[str, Any] = {}
    if experts is not None:
        shape = mesh.shape
        slots = rows * (length - 1) * experts.router.top_k / trainer.microbatches
        routed = {
            "experts": experts.num_experts // shape["expert"],
            "expert_rows": slots / experts.num_experts / (shape["data"] * shape["fsdp"] * shape["sequence"]),
            "expert_weight": module.features * experts.features // math.gcd(shape["tensor"], experts.features),
        }
    return StepFlops(devices=mesh.size, vocab_size=module.vocab_size, products=tuple(matrix_products(text)), **routed)


_PARTS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("x_proj", "b_proj", "c_proj", "dt_proj", "beta_proj", "decay_proj", "out_proj"),
)


def part_of(product: Product, vocab_size: int) -> str:
    """Name the part of a decoder that a product belongs to.

    Args:
        product: One product of its step.
        vocab_size: Rows of its token table, unlike its other sizes.
    """
    if _is_weighted_sum(product):
        return "weighted sums"
    if None in product.trips:
        return "experts"
    for part in _PARTS:
        if f"/{part}/" in product.op_name:
            return part
    if ".scan/" in product.op_name:
        return "scan"
    if vocab_size in (*product.shape, product.contracted):
        return "vocabulary"
    # A pipeline's loop has no names for its blocks. Of layers with experts "blocks" are the routers.
    return "attention" if len(product.shape) > 2 or "self_attn" in product.op_name else "blocks"


def _is_weighted_sum(product: Product) -> bool:
    """Say whether a product sums what a token's experts give; XLA forgets its name with the dimension it drops."""
    return len(product.shape) == 3 and 1 in product.shape


def table(split: StepFlops, alone: StepFlops) -> str:
    """Lay the operations of one device out beside an even split of one device's, a line per part.

    Args:
        split: The step on a mesh.
        alone: The step on one device.
    """
    here, whole = split.by_part(), alone.by_part()
    lines = [f"{'part':12}{'one device':>16}{'even split':>16}{'a device':>16}{'ratio':>8}"]
    rows = [(name, whole.get(name, 0), here.get(name, 0)) for name in dict.fromkeys((*whole, *here))]
    for name, total, mine in (*rows, ("all", alone.per_device, split.per_device)):
        even = total / split.devices
        ratio = f"{mine / even:8.3f}" if even else f"{'-':>8}"
        lines.append(f"{name:12}{total:>16,}{even:>16,.0f}{mine:>16,}{ratio}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the table of a decoder and a mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="fsdp=8", help="axes and factors, as in fsdp=4,tensor=2")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices when the platform is CPU")
    for name, default in (("layers", 4), ("width", 64), ("heads", 8), ("kv-heads", 8), ("mlp", 256), ("vocab", 320)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--length", type=int, default=32, help="positions of a row")
    parser.add_argument("--remat", default=None)
    parser.add_argument("--mixer", choices=MIXERS, default="attention", help="what mixes the tokens of a layer")
    parser.add_argument("--window", type=int, help="how many tokens a token reads, itself included")
    parser.add_argument("--sequence-impl", type=checked_sequence_implementation, default="auto", help="the exchange")
    options = parser.parse_args(arguments)
    if options.window is not None and options.mixer != "attention":
        parser.error(f"--window is of attention. Received: --window {options.window} --mixer {options.mixer}")
    # JAX reads it with its first device.
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={options.devices}")
    print(table(*_compiled(options)))


def _compiled(options: argparse.Namespace) -> tuple[StepFlops, StepFlops]:
    """Compile the step on the mesh and on one device."""
    import jax

    import dew
    from dew.objectives.language import LanguageModel
    from dew.placement import build_mesh

    fields = ("layers", "width", "heads", "kv_heads", "mlp", "vocab", "length", "remat")
    module = llama_like(**{name: getattr(options, name) for name in fields})
    layers = tuple(dataclasses.replace(layer, mixer=_mixer(layer.mixer, options)) for layer in module.layers)
    module = module.clone(layers=layers, sequence_impl=options.sequence_impl)
    factors = {name: int(size) for name, _, size in (part.partition("=") for part in options.mesh.split(","))}
    batch = {"tokens": np.ones((options.rows, options.length + 1), np.int32)}
    one = build_mesh(devices=jax.devices()[:1])

    def step(mesh: Any) -> StepFlops:
        layout = dew.Layout(min_shard=1)
        return step_flops(dew.Trainer(LanguageModel(module), "adamw", mesh=mesh, layout=layout), batch)

    return step(factors), step(one)


def _mixer(attention: AttentionSpec, options: argparse.Namespace) -> Any:
    """Give the mixer asked for, with heads as attention has them and a state as wide as a head."""
    sizes = {"num_heads": options.heads, "head_dim": attention.head_dim}
    if options.mixer == "mamba2":
        return Mamba2Spec(**sizes, num_groups=options.kv_heads, state_size=attention.head_dim)
    if options.mixer == "gated_delta_net":
        return GatedDeltaNetSpec(**sizes, num_keys=options.kv_heads, key_dim=attention.head_dim)
    return dataclasses.replace(attention, window=options.window)


if __name__ == "__main__":
    main()

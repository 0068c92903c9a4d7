"""What a training step sends between devices: each collective of the compiled program, its bytes, loop and trip count.

Run `python tools/collectives.py --mesh fsdp=4,tensor=2 --layers 4`, or give a checkpoint directory. Everything is read
from the optimized HLO of the step that the trainer compiles; nothing is allocated or run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dew.planning.hlo import Instruction, Trips, array_shapes, computations, running_instructions

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
ITEM_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16, "token": 0}
REDUCE_SCATTER = "reduce-scatter on GPU/TPU"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
        kind: `all-gather`, `all-reduce`, ...
        shapes: Shape of each result on one device; XLA combines several arrays into one instruction.
        bytes: Bytes of the results on one device, once.
        axes: Mesh axes whose devices take part.
        group_size: Devices that take part together.
        trips: Trip count of each loop around it, outermost first; None where the compiler does not know it.
        phase: `forward`, `backward` or `update`.
        op_name: Where it comes from, as JAX named it.
        note: What a reader should know, or the empty string.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    axes: tuple[str, ...]
    group_size: int
    trips: tuple[int | None, ...]
    phase: str
    op_name: str
    note: str = ""

    @property
    def executions(self) -> int:
        """How often it runs in a step; a loop of unknown length counts once."""
        return math.prod(trip or 1 for trip in self.trips)

    @property
    def step_bytes(self) -> int:
        """Bytes of its results on one device in one step."""
        return self.bytes * self.executions


def collectives(text: str, mesh_shape: Mapping[str, int], *, backend: str = "cpu") -> list[Collective]:
    """List the collectives of an optimized HLO module.

    Args:
        text: The module, as `compiled.as_text()` gives it.
        mesh_shape: Axis to size, outermost first, of the mesh it was compiled for.
        backend: Where it was compiled; CPU has no reduce-scatter, so a gradient's reduction is noted as one.

    Returns:
        The collectives in program order, those in a loop with the loop's trip count.

    Raises:
        ValueError: If the text has no entry computation.
    """
    return [
        _collective(instruction, trips, mesh_shape, backend)
        for instruction, trips in running_instructions(*computations(text))
        if _kind(instruction.opcode) is not None
    ]


def _kind(opcode: str) -> str | None:
    base = opcode.removesuffix("-start")
    return base if base in KINDS else None


def _collective(instruction: Instruction, trips: Trips, mesh_shape: Mapping[str, int], backend: str) -> Collective:
    kind = _kind(instruction.opcode)
    assert kind is not None, instruction.opcode
    found = array_shapes(instruction.result)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        found = found[len(found) // 2 :]  # an asynchronous start gives its operands, then its results
    shapes = tuple(shape for _, shape in found)
    size = sum(math.prod(shape) * _item_bytes(dtype) for dtype, shape in found)
    groups = replica_groups(instruction.line, math.prod(mesh_shape.values()))
    axes = _axes(groups, mesh_shape)
    op_name = instruction.op_name
    phase = _phase(op_name)
    reduces_gradient = kind == "all-reduce" and "fsdp" in axes and phase == "backward" and any(shapes)
    return Collective(
        kind=kind,
        shapes=shapes,
        bytes=size,
        axes=axes,
        group_size=max((len(group) for group in groups), default=1),
        trips=trips,
        phase=phase,
        op_name=op_name,
        note=REDUCE_SCATTER if backend == "cpu" and reduces_gradient else "",
    )


def _item_bytes(dtype: str) -> int:
    if dtype in ITEM_BYTES:
        return ITEM_BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 0


def _phase(op_name: str) -> str:
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name or "jvp" in op_name.split("/")[0] else "update"


def replica_groups(line: str, device_count: int) -> list[list[int]]:
    """Read which devices take part together.

    Args:
        line: The instruction, with `replica_groups` in any of XLA's three notations or `source_target_pairs`.
        device_count: Devices of the program.

    Returns:
        Groups of positions in the program's device order.
    """
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", line)
    if pairs:
        return _chains([tuple(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)\}", pairs[1])])
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", line)
    if listed:
        groups = [[int(i) for i in group.split(",") if i] for group in re.findall(r"\{([\d,]*)\}", listed[1])]
        return groups or [list(range(device_count))]
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        return _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2])).tolist()
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}", line
    )
    if named:
        return _named_groups(named)
    return [list(range(device_count))]


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    sizes = [int(size) for size in dims.split(",")]
    order = np.arange(math.prod(sizes)).reshape(sizes)
    return order.transpose([int(axis) for axis in permutation.split(",")]) if permutation else order


def _named_groups(named: re.Match[str]) -> list[list[int]]:
    """Read groups written as axes of a mesh of XLA's own: `mesh['a'=2,'b'=4] {'b'}`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
    ids = np.arange(math.prod(sizes.values()))
    if named[2]:
        ids = _iota(named[2], named[3]).reshape(-1)
    over: list[str] = []
    split: dict[str, int] = {}
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named[4]):
        if not before:
            over.append(name)
            split[name] = sizes[name]
            continue
        # A part of an axis: the factor `size` after the first `before` of it.
        parts = {f"{name}/0": int(before), f"{name}/1": int(size), f"{name}/2": sizes[name] // int(before) // int(size)}
        expanded: dict[str, int] = {}
        for axis, extent in sizes.items():
            expanded.update(parts if axis == name else {axis: extent})
        sizes = expanded
        over.append(f"{name}/1")
    grid = ids.reshape(list(sizes.values()))
    moved = np.moveaxis(grid, [list(sizes).index(axis) for axis in over], range(-len(over), 0))
    return moved.reshape(-1, math.prod(sizes[axis] for axis in over)).tolist()


def _chains(pairs: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Join the pairs of a permute into the sets of devices they connect."""
    owner: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = owner.get(source, {source}) | owner.get(target, {target})
        for device in joined:
            owner[device] = joined
    return [sorted(group) for group in {frozenset(group) for group in owner.values()}]


def _axes(groups: list[list[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Name the mesh axes along which the devices of a group differ."""
    varying = set()
    for group in groups:
        coordinates = np.array(np.unravel_index(group, list(mesh_shape.values())))
        varying |= {axis for axis, line in zip(mesh_shape, coordinates, strict=True) if len(set(line)) > 1}
    return tuple(axis for axis in mesh_shape if axis in varying)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """The collectives and the memory of one compiled step.

    Attributes:
        found: Every collective.
        parameter_bytes: Bytes of all parameters together.
        temporary_bytes: Bytes of temporaries on one device.
        argument_bytes: Bytes of state and batch on one device.
    """

    found: tuple[Collective, ...]
    parameter_bytes: int
    temporary_bytes: int
    argument_bytes: int

    def table(self) -> str:
        """Lay the collectives out as text, one line each, then totals per kind and axes."""
        lines = [f"{'phase':9}{'collective':20}{'axes':16}{'per run':>12}{'runs':>6}{'per step':>12}  results"]
        for item in self.found:
            runs = "?" if None in item.trips else str(item.executions)
            shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in item.shapes[:4])
            more = f" and {len(item.shapes) - 4} more" if len(item.shapes) > 4 else ""
            loop = f" in a loop of {'*'.join(str(trip or '?') for trip in item.trips)}" if item.trips else ""
            note = f"  ({item.note})" if item.note else ""
            lines.append(
                f"{item.phase:9}{item.kind:20}{'*'.join(item.axes) or '-':16}{item.bytes:>12,}{runs:>6}"
                f"{item.step_bytes:>12,}  {shapes}{more}{loop}{note}"
            )
        lines.append("")
        totals: dict[tuple[str, str, str], list[int]] = {}
        for item in self.found:
            total = totals.setdefault((item.kind, "*".join(item.axes) or "-", item.note), [0, 0])
            total[0] += item.executions
            total[1] += item.step_bytes
        for (kind, axes, note), (runs, size) in sorted(totals.items()):
            lines.append(f"{kind} over {axes}: {runs} a step, {size:,} bytes{f' ({note})' if note else ''}")
        lines.append(
            f"parameters {self.parameter_bytes:,} bytes; on one device: state and batch {self.argument_bytes:,}, "
            f"temporaries {self.temporary_bytes:,}"
        )
        return "\n".join(lines)


def step_report(trainer: Any, batch: Mapping[str, Any]) -> StepReport:
    """Compile a trainer's step for a batch's shapes and read its collectives and memory.

    Args:
        trainer: A `dew.Trainer`.
        batch: One host batch as its objective reads it.

    Returns:
        The report; nothing was allocated on a device.
    """
    import jax

    from dew.tree import named_leaves

    compiled = trainer.lower(batch).compile()
    memory = compiled.memory_analysis()
    shapes = named_leaves(trainer.abstract_variables())
    parameters = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for path, leaf in shapes.items() if path.startswith("params/")
    )
    return StepReport(
        found=tuple(collectives(compiled.as_text(), dict(trainer.mesh.shape), backend=jax.default_backend())),
        parameter_bytes=parameters,
        temporary_bytes=int(memory.temp_size_in_bytes),
        argument_bytes=int(memory.argument_size_in_bytes),
    )


def llama_like(
    *, layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int, length: int, remat: str | None
) -> Any:
    """Build a decoder of the Llama shape.

    Args:
        layers: Blocks.
        width: Model width.
        heads: Query heads.
        kv_heads: Key/value heads.
        mlp: Hidden width of the mlp.
        vocab: Vocabulary size.
        length: Longest context.
        remat: Recomputation policy.
    """
    from dew.nn.attention import AttentionSpec
    from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
    from dew.nn.mlp import MlpSpec
    from dew.nn.norm import NormSpec
    from dew.nn.rope import RotarySpec

    norm = NormSpec(eps=1e-5)
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width // heads, rotary=RotarySpec(theta=10000.0)
    )
    layer = LayerSpec(mixer=attention, mlp=MlpSpec(features=mlp), norm=norm)
    return CausalTransformer(vocab, width, (layer,) * layers, norm, max_length=length, remat=remat)


def main(arguments: list[str] | None = None) -> None:
    """Print the report of a model and a mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", nargs="?", help="checkpoint directory, Hub name or .gguf file; its weights are not read"
    )
    parser.add_argument("--mesh", default="fsdp=8", help="axes and factors, as in fsdp=4,tensor=2")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices when the platform is CPU")
    for name, default in (("layers", 4), ("width", 64), ("heads", 8), ("kv-heads", 8), ("mlp", 256), ("vocab", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--length", type=int, default=32, help="positions of a row")
    parser.add_argument("--remat", default=None)
    parser.add_argument("--min-shard", type=int, default=2**16, help="smallest leaf that is split, in elements")
    options = parser.parse_args(arguments)
    # JAX reads it with its first device.
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={options.devices}")
    print(report_of(options).table())


def report_of(options: argparse.Namespace) -> StepReport:
    """Build the model and the trainer that the options ask for, and report on its step."""
    import dew
    from dew.objectives.language import LanguageModel

    factors = {name: int(size) for name, _, size in (part.partition("=") for part in options.mesh.split(","))}
    if options.source is None:
        module = llama_like(
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            kv_heads=options.kv_heads,
            mlp=options.mlp,
            vocab=options.vocab,
            length=options.length,
            remat=options.remat,
        )
    else:
        from dew.pretrained.load import describe

        module = describe(options.source).module
    layout = dew.Layout(min_shard=options.min_shard)
    trainer = dew.Trainer(LanguageModel(module), "adamw", mesh=factors, layout=layout)
    return step_report(trainer, {"tokens": np.ones((options.rows, options.length + 1), np.int32)})


if __name__ == "__main__":
    main()

"""How each layer's experts are split on a mesh, what their exchange sends and what stays whole, in words.

Entry point: `experts_report`.
"""

import collections
import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from dew.nn.expert_dispatch import BANK_NAMES, TOKEN_NAMES
from dew.nn.moe import ExpertsSpec
from dew.parallel.expert_exchange import share_bytes
from dew.placement.mesh import batch_divisor
from dew.placement.rules import DEFAULT_RULES, STAGE, resolve, spec_axes


def experts_report(
    module: Any,
    *,
    mesh: Any,
    num_tokens: int | None = None,
    rows: int | None = None,
    microbatches: int | None = None,
) -> list[str]:
    """Say for each kind of layer with experts where they are and what a pass over it sends.

    Args:
        module: A `CausalTransformer`.
        mesh: A concrete or planned mesh; the active rules say what its axes split.
        num_tokens: Length of the rows; None takes the model's longest context.
        rows: Rows of the global batch; None takes the fewest that are split over devices and microbatches, and a
            pipeline the next number that is.
        microbatches: Microbatches of a pipeline; None takes one for each stage.

    Returns:
        A line per kind of layer; none where no layer has experts.
    """
    length = module.max_length if num_tokens is None else num_tokens
    stages, parts, when = mesh.shape[STAGE], 1, ""
    if stages > 1:
        parts = microbatches or stages
        divisor = batch_divisor(mesh, parts)
        rows = -(-(rows or 1) // divisor) * divisor
        when = f"in each of the {parts + stages - 1} ticks of a pipeline "
    rows = batch_divisor(mesh) if rows is None else rows
    staged = [(spec, rows // parts, when) for spec in module.expert_layers]
    behind = [(spec, rows, "") for spec in module.prediction_experts]
    lines = []
    for (spec, at_once, when), count in collections.Counter(staged + behind).items():
        facts = [f"{spec.num_experts}, {spec.router.top_k} a token", *_split(module, spec, mesh, at_once, length, when)]
        lines.append(f"experts of {count} layer{'s' if count > 1 else ''}: {'; '.join(facts)}")
    return lines


def _split(module: Any, spec: ExpertsSpec, mesh: Any, rows: int, length: int, when: str) -> list[str]:
    """Say what the mesh splits, the exchange and what stays whole."""
    size = mesh.shape["expert"]
    if spec.num_experts % size:
        return [f"refused: expert={size} does not divide them"]
    bank = _axes(mesh, BANK_NAMES["gate_proj"], (spec.num_experts, module.features, spec.features))
    tokens = _axes(mesh, TOKEN_NAMES, (rows, length, module.features))
    held = "all on each device" if bank[0] != ("expert",) else f"{spec.num_experts // size} on each of expert={size}"
    facts = [held]
    if bank[2]:
        facts.append("their hidden width over " + _sizes(mesh, bank[2]))
    if bank[0] == ("expert",):
        facts += [when + _exchange(module, spec, mesh, tokens, rows, length), "every other weight whole over expert"]
    if tokens[1]:
        statistics = 8 * spec.num_experts * length * (rows // _product(mesh, tokens[0]))
        over = _sizes(mesh, tokens[1])
        facts.append(f"{when}training on packed rows sums {statistics:,} bytes of statistics over {over}")
    return facts


def _exchange(module: Any, spec: ExpertsSpec, mesh: Any, tokens: Any, rows: int, length: int) -> str:
    """Say what tokens and sums of a layer cost on the expert axis."""
    at_hand = rows * length // _product(mesh, tokens[0]) // _product(mesh, tokens[1])
    if "expert" not in tokens[0]:
        return f"{rows * length} tokens stay where they are, and each device adds what its experts say"
    size, item = mesh.shape["expert"], jnp.dtype(module.dtype).itemsize
    counted = share_bytes(at_hand, spec.router.top_k, size, module.features, item)
    forward, backward, further = (each * (size - 1) // size for each in counted)
    return (
        f"{at_hand} tokens of a device send {forward:,} bytes each time a layer runs and {backward:,} backward, and "
        f"for each further share of an uneven routing {forward:,} and {further:,}"
    )


def _axes(mesh: Any, names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """Give the axes of more than one device that split each dimension."""
    spec = resolve(names, shape, mesh, nn.get_logical_axis_rules() or DEFAULT_RULES).spec
    entries = (*spec, *(None,) * (len(shape) - len(spec)))
    return tuple(tuple(axis for axis in spec_axes(type(spec)(entry)) if mesh.shape[axis] > 1) for entry in entries)


def _product(mesh: Any, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _sizes(mesh: Any, axes: tuple[str, ...]) -> str:
    return ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)

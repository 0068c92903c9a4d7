"""Will it fit: bytes per device of a model on a mesh, from its declarations alone.

Entry points: `planned_mesh`, `estimate_bytes`. No weight is read, no array made, and the devices need not exist.
Activations and the compiler's temporaries are not counted: they belong to a batch and to a compiled step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import optax
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType

from dew.inference.decode_mesh import decode_mesh, decode_place
from dew.inference.prefill import cache_shardings
from dew.kernels.attention_choice import Accelerator
from dew.nn.attention_report import attention_report, cache_report
from dew.nn.exchange_report import check_row_length
from dew.nn.experts_report import experts_report
from dew.objectives.language import LanguageModel
from dew.parallel.stages import refuse_unstaged
from dew.placement.explain import Explanation
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.memory import bytes_per_device
from dew.placement.mesh import AXES, BATCH_AXES, MeshSpec, spec_of_factors
from dew.placement.rules import STAGE
from dew.placement.stacks import stack_view
from dew.training.optimizer import as_optimizer
from dew.training.placing import abstract_state, plain, state_shardings

__all__ = ["Estimate", "estimate_bytes", "planned_mesh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes that one device holds.

    Attributes:
        mesh_shape: Axis to size.
        decode_shape: Axis to size of the mesh it generates on, without sequence and stage.
        num_parameters: Parameters of the model, over all devices.
        rows: Global rows of the cache.
        slots: Tokens a row of the cache holds.
        weights: The weights, in the dtype they are stored in to generate.
        cache: Keys and values.
        masters: The weights, in the dtype they are trained in.
        gradients: Their gradients; with accumulation also the running sums.
        optimizer_state: Moments and counters.
        tables: Whole token tables and the sums of their gradients, where a training step holds them: under
            schedule="1f1b".
        explanation: Where every leaf goes and why; its layers say which attention kernel they take, and inside which
            exchange where the mesh splits positions, which keys and values are kept more than once, where experts are,
            and why the model could not generate.
        refusal: Why the layout, or rows of so many slots, are refused on this mesh; None where neither is.
    """

    mesh_shape: Mapping[str, int]
    decode_shape: Mapping[str, int]
    num_parameters: int
    rows: int
    slots: int
    weights: int
    cache: int
    masters: int
    gradients: int
    optimizer_state: int
    tables: int
    explanation: Explanation
    refusal: str | None = None

    @property
    def generate(self) -> int:
        """Bytes a device holds to generate: weights and cache."""
        return self.weights + self.cache

    @property
    def train(self) -> int:
        """Bytes a device holds to train: masters, gradients, optimizer state and whole tables."""
        return self.masters + self.gradients + self.optimizer_state + self.tables


def planned_mesh(mesh: MeshSpec | Mapping[str, int], devices: int | None = None) -> AbstractMesh:
    """Shape a mesh over devices that need not exist.

    Args:
        mesh: A `MeshSpec` or a mapping of its fields, in which `data` asserts what is left.
        devices: How many devices; None takes just those that the mesh names.

    Returns:
        The mesh's axes and sizes.

    Raises:
        ValueError: If the factors do not divide the devices, or `data` is not what is left.
    """
    mesh, data = (mesh, None) if isinstance(mesh, MeshSpec) else spec_of_factors(mesh)
    count = mesh.reserved * (data or 1) if devices is None else devices
    if count < 1 or count % mesh.reserved:
        raise ValueError(
            f"The mesh reserves {mesh.reserved} devices, which does not divide {count}. Give a multiple of "
            f"{mesh.reserved} devices or lower a factor."
        )
    left = count // mesh.reserved
    if data is not None and data != left:
        raise ValueError(
            f"mesh says data={data}, but {count} devices leave data={left}. Leave 'data' out or change it."
        )
    sizes = (left, *(getattr(mesh, axis) for axis in AXES[1:]))
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def estimate_bytes(
    module: Any,
    mesh: Any,
    layout: Layout | None = None,
    *,
    optimizer: str | optax.GradientTransformation = "adamw",
    rows: int | None = None,
    slots: int | None = None,
    accumulation: int = 1,
    master_dtype: Any = "float32",
    packed: bool | None = None,
    device: Accelerator | None = None,
) -> Estimate:
    """Count what each device would hold to generate and to train.

    Args:
        module: A `CausalTransformer`.
        mesh: A concrete or planned mesh.
        layout: Where arrays live; None takes the defaults.
        optimizer: A name or an optax transformation.
        rows: Global rows of the cache; None takes one per row shard.
        slots: Tokens of a row; None takes the model's longest context.
        accumulation: Batches per optimizer update.
        master_dtype: Dtype the weights are trained in; None takes the module's.
        packed: Whether rows of training hold documents or padding, as those made from texts do; None tells both.
        device: What the mesh is made of, for the choice of kernels; None means the device that programs run on here.

    Returns:
        The estimate; what is refused on this mesh is reported in it, not raised.

    Raises:
        ValueError: If the optimizer is unknown, or rows, slots or accumulation is not positive.
    """
    layout = layout or Layout()
    declared, stacks = _declared(module), stack_view(module)
    decoding, weights, unable = _decoding(mesh, layout, declared, stacks)
    shards = math.prod(decoding.shape[axis] for axis in BATCH_AXES)
    rows, slots = shards if rows is None else rows, module.max_length if slots is None else slots
    for name, value in (("rows", rows), ("slots", slots), ("accumulation", accumulation)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1. Received: {name}={value}")
    cache = jax.eval_shape(lambda: module.init_cache(rows, slots))
    master = module if master_dtype is None else module.clone(param_dtype=master_dtype)
    trained = _declared(master)
    state = abstract_state(plain(trained), as_optimizer(optimizer), accumulation)
    places = state_shardings(layout, mesh, state, layout.shardings(mesh, trained))
    masters = bytes_per_device(state.params, places.params)
    with nn.logical_axis_rules(layout.rules):
        refusal = _refusal(module, layout, mesh, declared, stacks, num_tokens=slots, packed=packed, device=device)
        kernels = attention_report(module, mesh=mesh, num_tokens=slots, rows=rows, packed=packed, device=device)
        cached = cache_report(module, mesh=decoding)
        experts = experts_report(module, mesh=mesh, num_tokens=slots, rows=rows)
    sums = 0 if state.accumulator is None else bytes_per_device(state.accumulator, places.accumulator)
    return Estimate(
        mesh_shape=dict(mesh.shape),
        decode_shape=dict(decoding.shape),
        num_parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plain(declared)["params"])),
        rows=rows,
        slots=slots,
        weights=weights,
        cache=bytes_per_device(cache, cache_shardings(module, decoding, layout.rules, rows, slots)),
        masters=masters,
        gradients=masters + sums,
        optimizer_state=bytes_per_device(state.opt_state, places.opt_state),
        tables=master.pipelined_table_bytes if mesh.shape[STAGE] > 1 else 0,
        explanation=layout.explain(mesh, declared, stacks, layers=(*kernels, *cached, *experts, *unable)),
        refusal=refusal,
    )


def _decoding(mesh: Any, layout: Layout, declared: Any, stacks: Any) -> tuple[Any, int, list[str]]:
    """Give the mesh that a model generates on, the bytes of its weights there, and why it cannot."""
    try:
        place = decode_place(mesh, layout, declared, stacks)
    except LayoutRefused as refusal:
        folded = decode_mesh(mesh)
        weights = bytes_per_device(plain(declared), layout.shardings(folded, declared))
        return folded, weights, [f"generating is refused: {refusal}"]
    return place.mesh, place.bytes, []


def _declared(module: Any) -> Any:
    """Shapes of a module's variables in the boxes that declare their names."""
    objective = LanguageModel(module)
    return jax.eval_shape(lambda: objective.init(jax.random.key(0)))


def _refusal(module: Any, layout: Layout, mesh: Any, declared: Any, stacks: Any, **rows: Any) -> str | None:
    """Say why a layout, or rows as `check_row_length` takes them, cannot train on a mesh."""
    try:
        refuse_unstaged(mesh.shape[STAGE], module)
        layout.check(mesh, declared, layout.shardings(mesh, declared), stacks)
        check_row_length(module, mesh, **rows)
    except LayoutRefused as error:
        return str(error)
    return None

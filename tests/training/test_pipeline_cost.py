"""What a pipelined step costs: memory that does not grow with microbatches under 1F1B, and the stated operations.

The optimizer keeps moments and an average of the weights: both must stay on the stage of their layers.
"""

import collections
import dataclasses
import functools
import importlib.util
import math
import pathlib
import sys

import jax
import keras
import numpy as np
import pytest

from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec, RouterTraining
from dew.objectives.language import LanguageModel
from dew.parallel.schedules import SCHEDULES
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.stacks import stack_view
from dew.planning.flops import matrix_products
from dew.planning.hlo import computations, running_instructions
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from dew_keras.transformations import keras_transformation
from tests.tiny import tiny_decoder, tiny_layer

DEVICES, STAGES, FSDP = 8, 4, 2
# Only these sizes have a factor of 5 or 3: what holds a table or an activation is told from a layer's weights by it.
VOCAB_SIZE, LENGTH, LAYERS = 80, 48, 4
STACK_PASSES = {"gpipe": 3, "1f1b": 4}
"""How often a stage's products are computed for a microbatch: forward, twice backward, and 1F1B forward again.

Recomputing blocks adds a pass. A pass that serves the backward pass alone leaves out the product that ends a block, and
where a stage is one block, 1F1B's own is the only such pass.
"""


def load_tool():
    path = pathlib.Path(__file__).resolve().parents[2] / "tools" / "collectives.py"
    spec = importlib.util.spec_from_file_location("collectives_tool", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def trainer(schedule: str | None, microbatches: int, stages: int = STAGES, remat: str | None = None) -> Trainer:
    """Build the run of a decoder of four layers; None as schedule is one device."""
    layers = (tiny_layer(num_kv_heads=4),) * LAYERS
    module = tiny_decoder(layers=layers, vocab_size=VOCAB_SIZE, schedule=schedule or "gpipe", remat=remat)
    mesh = MeshSpec(stage=stages, fsdp=DEVICES // stages, microbatches=microbatches)
    mesh = mesh if schedule else build_mesh(MeshSpec(), jax.devices()[:1])
    optimizer = keras_transformation(keras.optimizers.Adam(use_ema=True), stack_view(module))
    return Trainer(LanguageModel(module), optimizer, mesh=mesh, layout=Layout(min_shard=1))


@functools.cache
def compiled(schedule: str | None, microbatches: int, stages: int = STAGES, remat: str | None = None):
    """Compile a step of one row per microbatch and device; None as schedule is the whole batch on one device."""
    rows = DEVICES // stages * microbatches
    batch = {"tokens": np.ones((rows, LENGTH + 1), np.int32)}
    return trainer(schedule, microbatches, stages, remat).lower(batch).compile()


def flops(*run) -> int:
    return sum(product.flops for product in matrix_products(compiled(*run).as_text()))


def travelling(schedule):
    return tool.collectives(compiled(schedule, 4).as_text(), {"fsdp": FSDP, "stage": STAGES})


def test_temporaries_of_1f1b_do_not_grow_with_the_microbatches_and_those_of_gpipe_do():
    few, many = (
        {name: compiled(name, count).memory_analysis().temp_size_in_bytes for name in SCHEDULES} for count in (4, 32)
    )
    assert many["1f1b"] <= 1.1 * few["1f1b"], (few, many)
    assert many["gpipe"] >= 3 * few["gpipe"], (few, many)
    assert many["1f1b"] <= many["gpipe"] / 4, (few, many)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_stages_run_the_same_instructions(schedule):
    of_ticks = [each for each in running_instructions(*computations(compiled(schedule, 4).as_text())) if each[1]]
    assert "dot" in {instruction.opcode for instruction, _ in of_ticks}
    assert "conditional" not in {instruction.opcode for instruction, _ in of_ticks}, "a branch could differ"
    assert all(None not in trips for _, trips in of_ticks), "and so could the length of a loop"


@pytest.mark.parametrize("schedule, scattered", [("gpipe", 4), ("1f1b", 4 + 7)])
def test_stages_send_each_other_the_bytes_that_are_stated(schedule, scattered):
    activation, ticks, found = LENGTH * 32 * 4, 4 + STAGES - 1, collections.Counter()
    for each in travelling(schedule):
        if each.axes == ("stage",) and each.shapes[0][-2:] in ((LENGTH, 32), (LENGTH // STAGES, 32)):
            found[each.kind] += each.step_bytes
    assert found["collective-permute"] == 2 * ticks * activation
    assert found["reduce-scatter"] == scattered * activation // STAGES
    assert found["all-gather"] == scattered * activation


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_token_tables_and_their_gradients_travel_once_a_step(schedule):
    of_tables = [each for each in travelling(schedule) if any(VOCAB_SIZE in shape for shape in each.shapes)]
    assert len(of_tables) >= 2, "a gather and a sum of gradients"
    assert all(each.executions == 1 for each in of_tables), of_tables


def test_what_routers_count_of_a_microbatch_is_gathered_on_no_device():
    # Scores split positions over tensor and stages, routers read whole rows: neither may be made from the other.
    experts = ExpertsSpec(num_experts=2, features=32, router=RouterSpec(top_k=1))
    module = tiny_decoder(
        layers=(dataclasses.replace(tiny_layer(), mlp=experts),) * 2,
        schedule="1f1b",
        router_training=RouterTraining(balance_loss=0.5),
    )
    layout, rows = Layout(min_shard=1, tolerance=1.0), 2  # of a microbatch on a device; experts leave attention whole
    run = Trainer(LanguageModel(module), "sgd", mesh=MeshSpec(stage=2, expert=2, tensor=2), layout=layout)
    found = tool.step_report(run, {"tokens": np.ones((4 * rows, LENGTH + 1), np.int32)}).found
    assert any(each.shapes[0][-3:] == (rows, LENGTH, 32) for each in found), "activations are"
    assert [each for each in found if any(shape[-2:] == (rows, LENGTH) for shape in each.shapes)] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_moments_and_averages_live_on_their_stage_and_never_travel_to_another(schedule):
    places = named_leaves(trainer(schedule, 4).shardings())
    kinds = {"variables/params", *(f"opt_state/slots/{kind}" for kind in ("momentum", "velocity", "average"))}
    of_layers = {path: place for path, place in places.items() if "/layers_" in path}
    assert {path.split("/layers_")[0] for path in of_layers} == kinds
    assert {place.spec[0] for place in of_layers.values()} == {"stage"}
    least = 32 * 32 // FSDP  # elements of a layer's smallest matrix on a device
    sizes = [(each, math.prod(shape)) for each in travelling(schedule) for shape in each.shapes if "stage" in each.axes]
    assert any(size % 3 == 0 for _, size in sizes), "activations go from stage to stage"
    assert [each for each, size in sizes if size >= least and size % 3 and size % 5] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "stages, microbatches, remat", [(2, 4, None), (4, 4, None), (4, 32, None), (2, 4, "full"), (4, 4, "full")]
)
def test_each_device_computes_what_the_timetable_says(schedule, stages, microbatches, remat):
    table = SCHEDULES[schedule].timetable(stages, microbatches)
    head = 3 * 2 * DEVICES // stages * microbatches * LENGTH * VOCAB_SIZE * 32
    whole = flops(None, STAGES) * microbatches // stages  # of DEVICES rows, times the rows a device has
    ticks = table.forward_ticks / microbatches
    assert table.backward_ticks == table.forward_ticks == microbatches + stages - 1
    forward = (whole - head) / 3
    ends = 2 * DEVICES // stages * microbatches * LENGTH * 64 * 32 * LAYERS  # the products that end the blocks
    stack = forward * STACK_PASSES[schedule]
    is_one_block = schedule == "1f1b" and stages == LAYERS
    if remat and not is_one_block:
        stack += forward
    if remat or is_one_block:
        stack -= ends
    assert flops(schedule, microbatches, stages, remat) == pytest.approx((stack * ticks + head) / DEVICES, rel=0.01)

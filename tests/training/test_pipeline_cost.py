"""What a pipelined step costs: memory that does not grow with microbatches under 1F1B, and the stated operations."""

import functools
import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest

from dew.objectives.language import LanguageModel
from dew.parallel.schedules import gpipe_timetable, one_f_one_b_timetable
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.planning.flops import matrix_products
from dew.training.trainer import Trainer
from tests.tiny import tiny_decoder, tiny_layer

VOCAB_SIZE = 80  # no other dimension's size
STAGES, FSDP, LENGTH = 4, 2, 64
TIMETABLES = {"gpipe": gpipe_timetable, "1f1b": one_f_one_b_timetable}
STACK_PASSES = {"gpipe": 3, "1f1b": 4}
"""How often a stage's products are computed for a microbatch: forward, twice backward, and 1F1B forward again."""


def load_tool():
    path = pathlib.Path(__file__).resolve().parents[2] / "tools" / "collectives.py"
    spec = importlib.util.spec_from_file_location("collectives_tool", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@functools.cache
def compiled(schedule: str | None, microbatches: int):
    """Compile a step of one row per microbatch and device; None as schedule is the whole batch on one device."""
    module = tiny_decoder(layers=(tiny_layer(num_kv_heads=4),) * 4, vocab_size=VOCAB_SIZE, schedule=schedule or "gpipe")
    mesh = MeshSpec(stage=STAGES, fsdp=FSDP, microbatches=microbatches)
    mesh = mesh if schedule else build_mesh(MeshSpec(), jax.devices()[:1])
    trainer = Trainer(LanguageModel(module), "sgd", mesh=mesh, layout=Layout(min_shard=1))
    return trainer.lower({"tokens": np.ones((FSDP * microbatches, LENGTH + 1), np.int32)}).compile()


def flops(schedule: str | None, microbatches: int) -> int:
    return sum(product.flops for product in matrix_products(compiled(schedule, microbatches).as_text()))


def test_temporaries_of_1f1b_do_not_grow_with_the_microbatches_and_those_of_gpipe_do():
    few, many = (
        {name: compiled(name, count).memory_analysis().temp_size_in_bytes for name in TIMETABLES} for count in (4, 32)
    )
    assert many["1f1b"] <= 1.1 * few["1f1b"], (few, many)
    assert many["gpipe"] >= 3 * few["gpipe"], (few, many)
    assert many["1f1b"] <= many["gpipe"] / 4, (few, many)


@pytest.mark.parametrize("schedule", TIMETABLES)
def test_token_tables_and_their_gradients_travel_once_a_step(schedule):
    found = tool.collectives(compiled(schedule, 4).as_text(), {"fsdp": FSDP, "stage": STAGES})
    of_tables = [each for each in found if any(VOCAB_SIZE in shape for shape in each.shapes)]
    assert len(of_tables) >= 2, "a gather and a sum of gradients"
    assert all(each.executions == 1 for each in of_tables), of_tables


@pytest.mark.parametrize("schedule", TIMETABLES)
@pytest.mark.parametrize("microbatches", [4, 32])
def test_each_device_computes_what_the_timetable_says(schedule, microbatches):
    table, devices = TIMETABLES[schedule](STAGES, microbatches), STAGES * FSDP
    head = 3 * 2 * FSDP * microbatches * LENGTH * VOCAB_SIZE * 32
    whole = flops(None, 4) * microbatches // 4
    ticks = table.forward_ticks / microbatches
    assert table.backward_ticks == table.forward_ticks == microbatches + STAGES - 1
    stack = (whole - head) * STACK_PASSES[schedule] / 3
    assert flops(schedule, microbatches) == pytest.approx((stack * ticks + head) / devices, rel=0.05)

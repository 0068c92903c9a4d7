"""The report says where experts are and what their exchange sends, as the compiled program has it."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from dew.nn.experts_report import experts_report
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.prediction import PredictionSpec
from dew.nn.router import RouterSpec
from dew.parallel.stages import microbatched_into
from dew.placement.mesh import MeshSpec, batch_divisor, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.planning import estimate_bytes, plan_text, planned_mesh
from dew.training.placing import plain
from tests.tiny import tiny_decoder, tiny_layer
from tools.collectives import collectives

EXPERTS = ExpertsSpec(num_experts=8, features=32, router=RouterSpec(top_k=2), shared=MlpSpec(features=32))
SPARSE = dataclasses.replace(tiny_layer(), mlp=EXPERTS)
MODULE = tiny_decoder(layers=(tiny_layer(), SPARSE, SPARSE))


def test_experts_have_a_line_with_what_is_split_and_what_is_sent():
    (line,) = experts_report(MODULE, mesh=planned_mesh({"expert": 4, "tensor": 2}), num_tokens=16)
    # 16 tokens of a device fill 8 slots for each of 4 peers: 32 x (2 x 32 floats + 2 x 8 bytes), 3/4 of it from others.
    assert line == (
        "experts of 2 layers: 8, 2 a token; 2 on each of expert=4; their hidden width over tensor=2; "
        "16 tokens of a device send 6,528 bytes each time a layer runs and 6,336 backward, and for each further share "
        "of an uneven routing 6,528 and 9,792; every other weight whole over expert"
    )
    (line,) = experts_report(MODULE, mesh=planned_mesh({"expert": 2, "sequence": 2}), num_tokens=16)
    assert line.endswith("training on packed rows sums 1,024 bytes of statistics over sequence=2")
    (line,) = experts_report(MODULE, mesh=planned_mesh({"fsdp": 8}))
    assert line == "experts of 2 layers: 8, 2 a token; all on each device"
    (line,) = experts_report(MODULE, mesh=planned_mesh({"expert": 4}), rows=1, num_tokens=5)
    assert "5 tokens stay where they are, and each device adds what its experts say" in line
    (line,) = experts_report(MODULE, mesh=planned_mesh({"expert": 3}))
    assert line.endswith("refused: expert=3 does not divide them")
    assert experts_report(tiny_decoder(), mesh=planned_mesh({"expert": 4})) == []


def test_in_a_pipeline_it_says_what_a_tick_sends_as_the_compiled_program_has_it():
    module, mesh, microbatches = tiny_decoder(layers=(SPARSE,) * 2), build_mesh(MeshSpec(expert=2, stage=2)), 3
    rows = batch_divisor(mesh, microbatches)
    (line,) = experts_report(module, mesh=mesh, num_tokens=16, rows=rows - 1, microbatches=microbatches)
    tokens = jnp.zeros((rows, 16), jnp.int32)
    params = jax.eval_shape(lambda: plain(module.init(jax.random.key(0), tokens[:1, :2])))["params"]
    loss = lambda params, tokens: jnp.sum(module.apply({"params": params}, tokens, method="hidden_states"))  # noqa: E731
    with jax.set_mesh(mesh), nn.logical_axis_rules(DEFAULT_RULES), microbatched_into(microbatches):
        text = jax.jit(jax.grad(loss)).lower(params, tokens).compile().as_text()
    found = [each for each in collectives(text, dict(mesh.shape)) if each.axes == ("expert",)]
    ticks = 4  # 3 microbatches through 2 stages of one layer; half of what arrives is from the other device
    sent = {
        phase: sum(each.step_bytes for each in found if each.phase == phase and None not in each.trips) // 2 // ticks
        for phase in ("forward", "backward")
    }
    assert (
        f"in each of the {ticks} ticks of a pipeline 16 tokens of a device send {sent['forward']:,} bytes each time a "
        f"layer runs and {sent['backward']:,} backward"
    ) in line
    assert sent["forward"] > 1000


def test_layers_that_predict_further_tokens_run_behind_a_pipeline_on_the_whole_batch():
    module = tiny_decoder(layers=(SPARSE,) * 2, prediction=PredictionSpec(layer=SPARSE))
    pair = experts_report(module, mesh=planned_mesh({"expert": 2, "stage": 2}), num_tokens=16, microbatches=3)
    assert "in each of the 4 ticks of a pipeline 16 tokens of a device send" in pair[0]
    assert pair[1].startswith("experts of 1 layer: ")
    assert "; 48 tokens of a device send" in pair[1]
    (line,) = experts_report(module, mesh=planned_mesh({"expert": 2}), num_tokens=16)
    assert line.startswith("experts of 3 layers: ")
    assert "; 16 tokens of a device send" in line


def test_a_plan_says_it():
    estimate = estimate_bytes(MODULE, planned_mesh({"expert": 2, "fsdp": 4}), slots=16)
    assert "experts of 2 layers: 8, 2 a token; 4 on each of expert=2; " in plan_text(estimate)

"""The report says where experts are and what their exchange sends, as the compiled program has it."""

import dataclasses

from dew.nn.experts_report import experts_report
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec
from dew.planning import estimate_bytes, plan_text, planned_mesh
from tests.tiny import tiny_decoder, tiny_layer

EXPERTS = ExpertsSpec(num_experts=8, features=32, router=RouterSpec(top_k=2), shared=MlpSpec(features=32))
SPARSE = dataclasses.replace(tiny_layer(), mlp=EXPERTS)
MODULE = tiny_decoder(layers=(tiny_layer(), SPARSE, SPARSE))


def test_experts_have_a_line_with_what_is_split_and_what_is_sent():
    (line,) = experts_report(MODULE, mesh=planned_mesh({"expert": 4, "tensor": 2}), num_tokens=16)
    # 16 tokens of a device fill 8 slots for each of 4 peers: 32 x (2 x 32 floats + 2 x 8 bytes), 3/4 of it from others.
    assert line == (
        "experts of 2 layers: 8, 2 a token; 2 on each of expert=4; their hidden width over tensor=2; "
        "16 tokens of a device send 6,528 bytes in a layer and 6,336 backward, once more for each further share of an "
        "uneven routing; every other weight whole over expert"
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


def test_a_plan_says_it():
    estimate = estimate_bytes(MODULE, planned_mesh({"expert": 2, "fsdp": 4}), slots=16)
    assert "experts of 2 layers: 8, 2 a token; 4 on each of expert=2; " in plan_text(estimate)

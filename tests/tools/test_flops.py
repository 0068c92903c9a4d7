"""Operations of the compiled training step: the formula on one device, an even split of them on every axis."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dew.nn.block import LayerSpec
from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.latent_attention import LatentAttentionSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.moe import ExpertsSpec
from dew.nn.norm import NormSpec
from dew.nn.prediction import PredictionSpec
from dew.nn.rope import RotarySpec
from dew.nn.router import RouterSpec
from dew.objectives.language import LanguageModel
from dew.placement import Layout, MeshSpec, build_mesh
from dew.planning.flops import decoder_step_flops
from dew.training.placing import plain
from dew.training.trainer import Trainer
from tools import flops
from tools.collectives import llama_like

ROWS, LENGTH = 16, 32
SHAPE = {"layers": 2, "width": 64, "heads": 8, "mlp": 160, "vocab": 112, "length": LENGTH}


def step(mesh, kv_heads=8, remat=None, tolerance=0.0, rows=ROWS, length=LENGTH, **fields):
    module = llama_like(**SHAPE | {"length": length}, kv_heads=kv_heads, remat=remat).clone(**fields)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if mesh is None else mesh
    trainer = Trainer(LanguageModel(module), "adamw", mesh=mesh, layout=Layout(min_shard=1, tolerance=tolerance))
    sizes = {"rows": rows, "length": length, "slices": trainer.mesh.shape["sequence"]}
    needed = decoder_step_flops(module, plain(trainer.abstract_variables()), **sizes)
    return flops.step_flops(trainer, {"tokens": np.ones((rows, length + 1), np.int32)}), needed


@pytest.fixture(scope="module")
def alone():
    return step(None)[0]


def test_the_count_on_one_device_is_the_formula(alone):
    assert alone.per_device == pytest.approx(step(MeshSpec())[1], rel=0.02)


def test_it_is_the_formula_with_a_head_of_its_own_shared_heads_and_unrolled_layers():
    found, needed = step(None, kv_heads=2, tie_embeddings=False, scan_layers=False)
    assert found.per_device == pytest.approx(needed, rel=0.02)


def test_it_is_the_formula_where_keys_and_values_are_expanded_from_latents():
    latents = LatentAttentionSpec(
        num_heads=8,
        kv_lora_rank=24,
        q_lora_rank=32,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=40,
        norm=NormSpec(eps=1e-6),
        rotary=RotarySpec(theta=1e4),
    )
    layers = llama_like(**SHAPE, kv_heads=8, remat=None).layers
    found, needed = step(None, layers=tuple(dataclasses.replace(layer, mixer=latents) for layer in layers))
    assert found.per_device == pytest.approx(needed, rel=0.02)


@pytest.mark.parametrize("is_shared", [False, True])
def test_layers_that_predict_further_tokens_are_in_the_formula_and_split_evenly(is_shared):
    layer = llama_like(**SHAPE, kv_heads=8, remat=None).layers[0]
    spec = PredictionSpec(layer=layer, depth=2, is_shared=is_shared)
    found, needed = step(None, prediction=spec)
    assert found.per_device == pytest.approx(needed, rel=0.02)
    assert needed > 1.9 * step(None)[1]
    if not is_shared:
        split, _ = step(MeshSpec(fsdp=2, tensor=2, sequence=2), prediction=spec)
        assert split.per_device == pytest.approx(found.per_device / 8, rel=0.05)


def test_full_recomputation_runs_the_forward_of_the_blocks_again(alone):
    found, needed = step(None, remat="full")
    blocks = needed - 6 * ROWS * LENGTH * SHAPE["vocab"] * SHAPE["width"]
    # What ends a block is not needed to go back through it, so it does not run again.
    last = 2 * ROWS * LENGTH * SHAPE["mlp"] * SHAPE["width"] * SHAPE["layers"]
    assert found.per_device == pytest.approx(needed + blocks / 3 - last, rel=0.02)


MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"sequence": 8},
    {"fsdp": 2, "tensor": 2},
    {"fsdp": 2, "tensor": 2, "sequence": 2},
]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: ",".join(f"{name}={size}" for name, size in mesh.items()))
def test_each_device_computes_its_even_share(mesh, alone):
    found, _ = step(mesh)
    assert found.devices == 8
    assert found.per_device == pytest.approx(alone.per_device / 8, rel=0.05)
    # Part by part: one part that is whole must not hide behind another.
    even = {part: total / 8 for part, total in alone.by_part().items()}
    assert found.by_part() == pytest.approx(even, rel=0.05)


# Of 256 positions on 8 devices: slices of 32, stripes of 16.
EXCHANGED = [
    ("gather", None, 7, 17 * 16 * 16),  # 2 N + 1 pairs of stripes
    ("gather", 20, 7, 2 * 3 * 16 * 16),  # each stripe of queries reads its own keys and two stripes before
    ("ring", None, 7, 17 * 16 * 16),
    ("ring", 40, 7, 3 * 32 * 32),  # two slices before its own
    ("banded", 20, 6, 32 * (32 + 19)),
]


@pytest.mark.parametrize("exchange, window, products, pairs", EXCHANGED)
def test_exchanges_compute_the_pairs_that_they_state_and_the_rest_splits_evenly(exchange, window, products, pairs):
    rows, length = 8, 256
    (layer, *_) = llama_like(**SHAPE, kv_heads=8, remat=None).layers
    windowed = dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, window=window))
    fields = {"rows": rows, "length": length, "layers": (windowed,) * 2, "sequence_impl": exchange}
    found, needed = step(MeshSpec(sequence=8), **fields)
    a_pair = 2 * SHAPE["width"] * rows * SHAPE["layers"]  # one product in all heads
    attention = found.by_part()["attention"]
    assert attention == pytest.approx(products * pairs * a_pair, rel=0.02)
    assert found.per_device - attention == pytest.approx((needed - 6 * length**2 * a_pair) / 8, rel=0.02)


SCANS = (
    Mamba2Spec(num_heads=16, head_dim=8, num_groups=8, state_size=12),
    GatedDeltaNetSpec(num_heads=16, head_dim=20, num_keys=8, key_dim=12),
)


@functools.cache
def step_of_scans(mixers=SCANS, **mesh):
    spec = MeshSpec(**mesh) if mesh else None
    layers = tuple(LayerSpec(mixer=mixer, mlp=None, norm=NormSpec(eps=1e-5)) for mixer in mixers)
    # Slices of four are whole chunks; one group or its convolution leaves some matrices whole on a tensor axis.
    return step(spec, tolerance=1.0, rows=8, length=512, layers=layers)


def test_scans_are_the_formula():
    found, needed = step_of_scans()
    assert found.per_device == pytest.approx(needed, rel=0.005)


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"sequence": 4, "tensor": 2}], ids=str)
def test_scans_split_evenly_but_for_what_slices_cost(mesh):
    (found, needed), (alone, _) = step_of_scans(**mesh), step_of_scans()
    assert found.per_device == pytest.approx(needed / 8, rel=0.05)
    even = {part: total / 8 for part, total in alone.by_part().items()}
    if "sequence" in mesh:
        even["scan"] += needed / 8 - alone.per_device / 8
        assert needed < 1.2 * alone.per_device
    assert found.by_part() == pytest.approx(even, rel=0.05)


def test_a_group_that_a_tensor_axis_does_not_divide_is_projected_and_scored_on_each_device():
    mixer = dataclasses.replace(SCANS[0], num_groups=1)
    (found, _), (alone, _) = step_of_scans((mixer,), tensor=8), step_of_scans((mixer,))
    tokens, chunk = 8 * 512, 128
    scores = 2 * 4 * tokens * chunk * mixer.state_size
    projections = 2 * 6 * tokens * SHAPE["width"] * mixer.state_size
    whole = scores + projections
    assert found.per_device == pytest.approx(whole + (alone.per_device - whole) / 8, rel=0.05)


EXPERTS = ExpertsSpec(num_experts=8, features=48, router=RouterSpec(top_k=2))
ROWS_OF_EXPERTS = 128
"""Rows with which every expert fills its blocks on every mesh here, a microbatch's too."""


@functools.cache
def step_of_experts(**mesh):
    spec = MeshSpec(**mesh) if mesh else None
    dense = llama_like(**SHAPE, kv_heads=8, remat=None).layers[0]
    # An expert axis splits nothing but experts.
    layers = (dataclasses.replace(dense, mlp=EXPERTS),) * SHAPE["layers"]
    return step(spec, tolerance=1.0, rows=ROWS_OF_EXPERTS, layers=layers)


def test_experts_are_the_formula_at_an_even_routing():
    found, needed = step_of_experts()
    assert found.per_device == pytest.approx(needed, rel=0.02)
    # Three matrices for each of two experts a token, forward and twice backward.
    rows = ROWS_OF_EXPERTS * LENGTH * EXPERTS.router.top_k
    assert found.by_part()["experts"] == 18 * rows * SHAPE["width"] * EXPERTS.features * SHAPE["layers"]


EXPERT_MESHES = [{"expert": 8}, {"expert": 4, "fsdp": 2}, {"expert": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("mesh", EXPERT_MESHES, ids=str)
def test_with_experts_each_device_computes_its_even_share(mesh):
    (found, needed), (alone, _) = step_of_experts(**mesh), step_of_experts()
    assert found.per_device == pytest.approx(needed / 8, rel=0.05)
    even = {part: total / 8 for part, total in alone.by_part().items()}
    # Each device of a tensor group routes, and weighs, the tokens of the group; a token is weighed wherever it is sent.
    even["blocks"] *= mesh.get("tensor", 1)
    even["weighted sums"] *= mesh.get("tensor", 1) * min(EXPERTS.router.top_k, mesh["expert"])
    assert found.by_part() == pytest.approx(even, rel=0.05)


def test_stages_of_experts_compute_their_idle_turns_too():
    stages, microbatches = 2, 4
    (found, _), (alone, _) = step_of_experts(stage=stages, expert=2, microbatches=microbatches), step_of_experts()
    turns = (microbatches + stages - 1) / microbatches
    even = {part: total / 8 for part, total in alone.by_part().items()}
    assert found.by_part()["experts"] == pytest.approx(turns * even["experts"], rel=0.05)
    blocks = found.per_device - found.by_part()["vocabulary"]
    assert blocks == pytest.approx(turns * (sum(even.values()) - even["vocabulary"]), rel=0.05)


def test_an_expert_fills_its_last_block_up():
    of = flops.StepFlops(devices=8, vocab_size=64, products=(), experts=2, expert_rows=65)
    assert [of.blocks(rows) for rows in (128, 64, 8)] == [2, 4, 18]


def test_stages_compute_their_idle_turns_too(alone):
    # Every tick runs a stage, on zeros where no microbatch is there: M + S - 1 turns for M. The loss splits evenly.
    stages, microbatches = 2, 4
    found, _ = step(MeshSpec(stage=stages, fsdp=2, microbatches=microbatches))
    parts, whole = found.by_part(), alone.by_part()
    assert parts.pop("vocabulary") == pytest.approx(whole["vocabulary"] / 8, rel=0.05)
    turns = (microbatches + stages - 1) / microbatches
    blocks = sum(whole.values()) - whole["vocabulary"]
    assert sum(parts.values()) == pytest.approx(turns * blocks / 8, rel=0.05)


def test_heads_that_do_not_divide_are_computed_whole_and_the_table_says_so(alone):
    found, _ = step(MeshSpec(tensor=8), kv_heads=2, tolerance=0.1)
    grouped, _ = step(None, kv_heads=2)
    ratios = {part: mine * 8 / grouped.by_part()[part] for part, mine in found.by_part().items()}
    assert {part for part, ratio in ratios.items() if ratio > 1.05} == {"k_proj", "v_proj"}
    lines = {line.split()[0]: line.split()[1:] for line in flops.table(found, grouped).splitlines()}
    assert lines["part"] == ["one", "device", "even", "split", "a", "device", "ratio"]
    assert (lines["k_proj"][-1], lines["q_proj"][-1]) == ("8.000", "1.000")


@pytest.mark.parametrize(
    "options, mixed",
    [
        (["--mesh", "sequence=4,tensor=2", "--sequence-impl", "ring", "--window", "5"], "attention"),
        (["--mesh", "tensor=2", "--mixer", "mamba2"], "scan"),
    ],
    ids=str,
)
def test_the_command_prints_the_table(capsys, options, mixed):
    flops.main(["--layers", "2", "--length", "8", "--width", "32", "--mlp", "64", *options])
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert mixed in printed
    assert printed[-1] == "all"

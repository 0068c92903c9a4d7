"""Pipelines of patterns of layers, evaluation, and where each layer lives: as on one device, and on its stage alone.

Every mesh with stages, with all sets of features, is in `tests/training/test_mesh_law.py`.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from dew.nn.embed import EmbeddingSpec, HeadSpec
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.training.optimizer import make_optimizer
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

STRICT = Layout(rules=(*DEFAULT_RULES, ("norm", "tensor")), min_shard=1, tolerance=0)
SCHEDULES = ["gpipe", "1f1b"]
RTOL = 1e-5
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, one kind of batch and the meshes they are tried on.

    Attributes:
        mesh: The mesh with stages.
        layers: Blocks of the model, "uniform" or "pattern".
        packed: Whether rows hold several documents.
        accumulation: Batches per update.
    """

    mesh: MeshSpec
    layers: str = "uniform"
    packed: bool = False
    accumulation: int = 1


CASES = {
    "stage=2 M=4 fsdp=2 tensor=2, packed, accumulated": Case(
        MeshSpec(stage=2, microbatches=4, fsdp=2, tensor=2), packed=True, accumulation=2
    ),
    "stage=2 M=3 tensor=4, pattern": Case(MeshSpec(stage=2, microbatches=3, tensor=4), layers="pattern"),
}
LAYERS = {
    "uniform": (tiny_layer(num_kv_heads=4),) * 4,
    # Fewer blocks would be compiled as four loops; stages share out one.
    "pattern": ((tiny_layer(num_kv_heads=4, window=8),) * 3 + (tiny_layer(num_kv_heads=4),)) * 2,
}


# Learned positions and a bounded head: under 1F1B both are scored, and learned, between the stages' passes.
ENDS = {"embedding": EmbeddingSpec(positions=64), "head": HeadSpec(scale=2.0, softcap=1.5)}


def batch_of(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Draw tokens with unequal masks; a packed row holds two documents of its own lengths and padding."""
    batch = tiny_batch(rows=12 if case.layers == "pattern" else 8, length=48, seed=seed)
    if case.packed:
        rows, length = batch["tokens"].shape
        ends = np.random.default_rng(seed).integers(5, length - 9, rows)[:, None]
        slots = np.arange(length)[None]
        batch["segment_ids"] = np.where(slots < ends, 1, np.where(slots < length - 4, 2, 0)).astype(np.int32)
    return batch


@functools.cache
def drawn(layers: str) -> Any:
    """Draw the weights to train from, which are the same on every mesh."""
    alone = build_mesh(MeshSpec(), jax.devices()[:1])
    return jax.device_get(
        Trainer(LanguageModel(tiny_decoder(layers=LAYERS[layers], **ENDS)), "sgd", mesh=alone).place().variables
    )


@functools.cache
def trained(case: Case, schedule: str | None) -> tuple[list[dict], dict, dict, Trainer, Any]:
    """Run three batches; None as schedule is one device.

    Returns:
        Statistics of each batch, the first update's gradient (Adam's first moment), the weights, trainer and state.
    """
    module = tiny_decoder(layers=LAYERS[case.layers], schedule=schedule or "gpipe", **ENDS)
    mesh = case.mesh if schedule else build_mesh(MeshSpec(), jax.devices()[:1])
    # A large eps: Adam divides by the gradient's own size, which would magnify rounding where that is near 0.
    optimizer = make_optimizer("adamw", 1e-2, eps=1e-2)
    run = Trainer(LanguageModel(module), optimizer, mesh=mesh, layout=STRICT, accumulation=case.accumulation)
    loop, statistics, moments = run.loop(run.place(drawn(case.layers))), [], {}
    for step in range(STEPS):
        window = [batch_of(case, seed) for seed in range(step * case.accumulation, (step + 1) * case.accumulation)]
        statistics.append(jax.device_get(loop.step(*window).statistics))
        moments = moments or first_moments(jax.device_get(loop.state.opt_state))
    return statistics, moments, named_leaves(jax.device_get(loop.state.params)), run, loop.state


def first_moments(opt_state: Any) -> dict[str, Any]:
    """Pick Adam's first moments, by the path of their parameter."""
    return {path.split("/mu/")[1]: leaf for path, leaf in named_leaves(opt_state).items() if "/mu/" in path}


def assert_close(got, want, what):
    scale = np.max(np.abs(want))
    assert scale > 0, f"{what} is zero: the test could not fail"
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * scale, err_msg=what)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_three_updates_equal_those_of_one_device(name, schedule):
    statistics, gradients, params, _, _ = trained(CASES[name], schedule)
    want_statistics, want_gradients, want_params, _, _ = trained(CASES[name], None)
    for step, (got, want) in enumerate(zip(statistics, want_statistics, strict=True)):
        for key in want:
            np.testing.assert_allclose(got[key].total, want[key].total, rtol=RTOL, err_msg=f"step {step}: {key}")
            np.testing.assert_array_equal(got[key].mass, want[key].mass)
    assert gradients.keys() == want_gradients.keys() == want_params.keys()
    for path in want_params:
        assert_close(gradients[path], want_gradients[path], f"gradient of {path}")
        assert_close(params[path], want_params[path], path)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_each_device_holds_the_layers_of_its_stage_and_its_share_of_the_tables(name, schedule):
    *_, run, state = trained(CASES[name], schedule)
    stages = run.mesh.shape["stage"]
    trees = {"": named_leaves(state.params), "mu ": first_moments(state.opt_state)}
    for kind, tree in trees.items():
        banks = {path: leaf for path, leaf in tree.items() if path.startswith("layers_")}
        assert banks
        for path, leaf in banks.items():
            share = leaf.shape[0] // stages
            for shard in leaf.addressable_shards:
                stage = int(np.argwhere(run.mesh.devices == shard.device)[0][-1])
                assert shard.index[0] == slice(stage * share, (stage + 1) * share), f"{kind}{path}"
        for path in set(tree) & {"embed_tokens/embedding", "lm_head/embedding"}:
            rows = tree[path].sharding.shard_shape(tree[path].shape)[0]
            assert rows == tree[path].shape[0] // (stages * run.mesh.shape["tensor"]), f"{kind}{path}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_equals_that_of_one_device(schedule):
    case = CASES["stage=2 M=4 fsdp=2 tensor=2, packed, accumulated"]

    def held_out(schedule):
        *_, run, _ = trained(case, schedule)
        return run.objective.report(run.evaluate(run.place(drawn(case.layers)).variables, [batch_of(case, 7)]))

    assert held_out(schedule) == pytest.approx(held_out(None), rel=1e-5)

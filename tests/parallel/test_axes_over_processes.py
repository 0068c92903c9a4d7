"""Positions, stages and experts split over processes: each reads its share, the losses are those of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec, RouterTraining
from dew.objectives.language import LanguageModel
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.partition import data_partition
from dew.training.trainer import Trainer
from tests.parallel.sequences import packed_batch
from tests.processes import results, run_pool
from tests.tiny import tiny_decoder, tiny_layer

PROGRAM = """
import json
from dew.placement import initialize
assert initialize()
from tests.parallel.test_axes_over_processes import MESHES, trained
print("RESULT " + json.dumps({name: trained(name) for name in MESHES}))
"""
# Two processes of two devices each: (spec, places of the devices, share and number of shares of each process, readers).
MESHES = {
    "sequence": (MeshSpec(sequence=4), (0, 1, 2, 3), ([0, 1, 2], [0, 1, 2])),
    "stage": (MeshSpec(stage=2, fsdp=2, microbatches=4), (0, 2, 1, 3), ([0, 1, 2], [0, 1, 2])),  # a stage a process
    "expert": (MeshSpec(expert=2, fsdp=2), (0, 1, 2, 3), ([0, 2, 1], [1, 2, 1])),
}
# Every token reads both experts: on two processes none could be chosen differently.
BOTH = ExpertsSpec(num_experts=2, features=32, router=RouterSpec(top_k=2))
MODELS = {
    "sequence": {},
    "stage": {"schedule": "1f1b"},
    "expert": {
        "layers": (dataclasses.replace(tiny_layer(), mlp=BOTH),) * 2,
        "router_training": RouterTraining(balance_loss=0.5, z_loss=0.1),
    },
}


def trained(name, *, is_alone=False):
    """Train two steps; give this process's share of the batches and the losses."""
    spec, places, _ = MESHES[name]
    devices = jax.devices()
    mesh = build_mesh(MeshSpec(), devices[:1]) if is_alone else build_mesh(spec, [devices[place] for place in places])
    run = Trainer(
        LanguageModel(tiny_decoder(num_layers=2, **MODELS[name])),
        "adamw",
        mesh=mesh,
        microbatches=None if is_alone else spec.microbatches,
    )
    share = data_partition(mesh)
    loop = run.loop(run.place())
    batches = ({k: v[share.index :: share.count] for k, v in packed_batch(seed).items()} for seed in range(2))
    return dataclasses.astuple(share), [result.read()["loss"].value() for result in loop.run(batches)]


@functools.cache
def pool():
    return results(run_pool(PROGRAM))


@pytest.mark.parametrize("name", MESHES)
def test_two_processes_train_as_one_device(name):
    (share, ours), (other_share, theirs) = (one[name] for one in pool())
    assert (share, other_share) == MESHES[name][2]
    assert ours == theirs
    np.testing.assert_allclose(ours, trained(name, is_alone=True)[1], rtol=1e-5)

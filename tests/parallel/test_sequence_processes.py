"""A sequence axis that spans processes: both read one share, and the losses are those of one device."""

import jax
import numpy as np

from dew.objectives.language import LanguageModel
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.trainer import Trainer
from tests.parallel.sequences import packed_batch
from tests.processes import results, run_pool
from tests.tiny import tiny_decoder

PROGRAM = """
import json
from dew.placement import MeshSpec, data_partition, initialize
assert initialize()
import dataclasses
from tests.parallel.test_sequence_processes import losses
from dew.placement.mesh import build_mesh
mesh = build_mesh(MeshSpec(sequence=4))
print("RESULT " + json.dumps([dataclasses.astuple(data_partition(mesh)), losses(mesh)]))
"""


def losses(mesh):
    """Train two steps; each process gives the share that it reads."""
    run = Trainer(LanguageModel(tiny_decoder(num_layers=2)), "adamw", mesh=mesh)
    loop = run.loop(run.place())
    return [result.read()["loss"].value() for result in loop.run(packed_batch(seed) for seed in range(2))]


def test_two_processes_that_hold_slices_of_the_same_rows_train_as_one_device():
    (first, ours), (second, theirs) = results(run_pool(PROGRAM))
    assert first == second == [0, 1, 2]
    assert ours == theirs
    np.testing.assert_allclose(ours, losses(build_mesh(MeshSpec(), jax.devices()[:1])), rtol=1e-5)

"""Initial values depend on the key and a layer's own name: not on scanning, banks, meshes or stages."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dew.nn.mamba2 import Mamba2Spec
from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_decoder, tiny_layer

STRICT = Layout(rules=(*DEFAULT_RULES, ("norm", "tensor"), ("router", "tensor")), min_shard=1, tolerance=0)
LAYERS = (
    dataclasses.replace(tiny_layer(), mixer=Mamba2Spec(num_heads=4, head_dim=8, num_groups=2, state_size=8)),
    dataclasses.replace(
        tiny_layer(num_kv_heads=4, window=8), mlp=ExpertsSpec(num_experts=4, features=16, router=RouterSpec(top_k=2))
    ),
) * 2


@functools.cache
def initial(spec: MeshSpec | None, **fields) -> dict[str, np.ndarray]:
    """Draw the variables of a model on a mesh, None for one device, by their paths per layer."""
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if spec is None else spec
    trainer = Trainer(LanguageModel(tiny_decoder(layers=LAYERS, **fields)), "sgd", mesh=mesh, layout=STRICT)
    return named_leaves(trainer.stacks.unstack(jax.device_get(trainer.place().params)))


@pytest.mark.parametrize(
    "spec, fields",
    [
        (None, {"scan_layers": False}),
        (None, {"bank_layers": 1}),
        (MeshSpec(expert=2, fsdp=2, tensor=2), {}),
        (MeshSpec(fsdp=8), {"scan_layers": False}),
        (MeshSpec(stage=2, expert=2, fsdp=2), {}),
        (MeshSpec(stage=2, sequence=2, tensor=2), {"schedule": "1f1b"}),
    ],
    ids=str,
)
def test_neither_scanning_nor_meshes_change_initial_values(spec, fields):
    got, want = initial(spec, **fields), initial(None)
    assert got.keys() == want.keys()
    matrices = [leaf.tobytes() for path, leaf in want.items() if path.endswith("kernel") or "/experts/" in path]
    assert len(set(matrices)) == len(matrices) > 16, "layers differ"
    for path, leaf in want.items():
        np.testing.assert_allclose(got[path], leaf, rtol=0, atol=1e-7, err_msg=path)

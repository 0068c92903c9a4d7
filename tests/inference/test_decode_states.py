"""Generation of models with states: the tokens of the full forward, on one device, on every mesh, from the facade."""

import jax
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import dew_keras
from dew.inference import generate
from dew.inference.prefill import cache_shardings
from dew.placement import DEFAULT_RULES, Layout, MeshSpec, build_mesh
from dew.planning import estimate_bytes
from dew.tree import named_leaves
from tests.nn.decoder_laws import STRICT
from tests.nn.test_gated_delta_net import LAYERS as DELTA_LAYERS
from tests.nn.test_latent_attention import DENSE as LATENT
from tests.nn.test_mamba2 import MODELS, decoder
from tests.tiny import tiny_batch, tiny_decoder

DELTA = DELTA_LAYERS[0]
LENGTHS = (5, 17, 1, 30)
COUNT = 12
MESHES = {
    "tensor=4": MeshSpec(tensor=4),
    "fsdp=2 tensor=2 sequence=2": MeshSpec(fsdp=2, tensor=2, sequence=2),
}


def prompts():
    generator = np.random.default_rng(0)
    return tuple(tuple(generator.integers(1, 64, length).tolist()) for length in LENGTHS)


@pytest.mark.parametrize(
    "name, mesh",
    [("mamba", None), ("hybrid", None), ("mamba", "tensor=4"), *(("hybrid", mesh) for mesh in MESHES)],
)
def test_greedy_on_every_mesh_is_the_full_forward_repeated(name, mesh):
    decoder(name).assert_greedy_is_the_full_forward_repeated(prompts(), COUNT, mesh and MESHES[mesh])


def test_the_state_is_split_by_rows_and_heads_and_counted():
    module = decoder("hybrid").module
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2))
    shardings = cache_shardings(module, mesh, DEFAULT_RULES, 8, 128)
    scans, keys = shardings.banks
    rows = (None, ("data", "fsdp"))
    assert scans.state.spec == keys.keys.spec == PartitionSpec(*rows, "tensor")
    assert (scans.x.spec, scans.b.spec) == (PartitionSpec(*rows, None, "tensor"), PartitionSpec(*rows))
    cache = jax.jit(lambda: module.init_cache(8, 128), out_shardings=shardings)()
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
    assert estimate_bytes(module, mesh, Layout(min_shard=1), rows=8, slots=128).cache == held


def fitted(facade):
    """Train on, and give the losses and the whole training state."""
    history = facade.fit(tiny_batch(rows=8, length=16), batch_size=8, epochs=3, verbose=0)
    return history.history["loss"], jax.device_get(named_leaves(facade._engine.state))


@pytest.mark.parametrize("layers", [MODELS["hybrid"], (DELTA, LATENT) * 2], ids=["hybrid", "delta nets and latents"])
def test_the_facade_fits_generates_and_fits_on_a_mesh_with_positions_split(layers):
    facade, other = (dew_keras.Model(tiny_decoder(layers=layers)) for _ in range(2))
    for each in (facade, other):
        each.compile(keras.optimizers.Adam(0.05), mesh={"sequence": 2, "tensor": 2}, layout=STRICT)
        losses, _ = fitted(each)
        assert losses[-1] < losses[0]
    got = facade.generate(prompts(), max_new_tokens=6, stop_token_ids=[], strip_prompt=True)
    want = generate(facade.module, jax.device_put(jax.device_get(facade.variables)), prompts(), max_new_tokens=6)
    assert tuple(map(tuple, got)) == want.tokens
    jax.tree.map(np.testing.assert_array_equal, fitted(facade), fitted(other))

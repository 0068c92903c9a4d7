"""Generation of models with states: the tokens of the full forward, on one device, on every mesh, from the facade."""

import functools

import jax
import jax.numpy as jnp
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
from tests.nn.test_gated_delta_net import LAYERS as DELTA_LAYERS
from tests.nn.test_latent_attention import DENSE as LATENT
from tests.nn.test_mamba2 import MODELS, STRICT, model
from tests.tiny import tiny_batch, tiny_decoder

DELTA = DELTA_LAYERS[0]
CONTEXT = 64
LENGTHS = (5, 17, 1, 30)
COUNT = 12
MESHES = {
    "tensor=4": MeshSpec(tensor=4),
    "fsdp=2 tensor=2 sequence=2": MeshSpec(fsdp=2, tensor=2, sequence=2),
}


def prompts():
    generator = np.random.default_rng(0)
    return [generator.integers(1, 64, length).tolist() for length in LENGTHS]


@functools.cache
def slow_greedy(name):
    """Greedy tokens from whole rows, run again for every token, without a cache and without padding on the left."""
    module, variables, _ = model(name)
    run = jax.jit(module.apply)
    rows = np.zeros((len(LENGTHS), CONTEXT), np.int32)
    for row, prompt in zip(rows, prompts(), strict=True):
        row[: len(prompt)] = prompt
    for step in range(COUNT):
        logits = np.asarray(run(variables, rows))
        for row, length in enumerate(LENGTHS):
            rows[row, length + step] = np.argmax(logits[row, length + step - 1])
    return tuple(tuple(rows[row, length : length + COUNT].tolist()) for row, length in enumerate(LENGTHS))


@pytest.mark.parametrize("name", ["mamba", "hybrid"])
def test_greedy_is_the_full_forward_repeated(name):
    module, variables, _ = model(name)
    got = generate(module, variables, prompts(), max_new_tokens=COUNT)
    assert got.tokens == slow_greedy(name)
    assert max(len(set(row)) for row in got.tokens) > 3, "the law says little about a model that repeats itself"


@pytest.mark.parametrize("name, mesh", [("mamba", "tensor=4"), *(("hybrid", mesh) for mesh in MESHES)])
def test_every_mesh_gives_the_tokens_of_one_device(name, mesh):
    module, variables, _ = model(name)
    devices = build_mesh(MESHES[mesh])
    shardings = STRICT.shardings(devices, jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    got = generate(
        module, jax.device_put(variables, shardings), prompts(), max_new_tokens=COUNT, mesh=devices, layout=STRICT
    )
    assert got.tokens == slow_greedy(name)


def test_the_state_is_split_by_rows_and_heads_and_counted():
    module, _, _ = model("hybrid")
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

"""Mamba-2 blocks and hybrids: the slow decoder's numbers, decoding, padding, documents, every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.block import DecoderLayer, LayerSpec, Surroundings
from dew.nn.embed import EmbeddingSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.masks import causal_visibility
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.nn.sharding import unboxed
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.placement.stacks import stack_view
from dew.training.step import batch_gradients
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.nn import slow_decoder
from tests.parallel.sequences import packed_batch
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer
from tests.tools.test_collectives import tool

NORM = NormSpec(eps=1e-5)
GROUPED = Mamba2Spec(num_heads=8, head_dim=8, num_groups=4, state_size=6, norm_groups=4, bias=True, conv_bias=False)
SHARED = Mamba2Spec(num_heads=4, head_dim=16, num_groups=1, state_size=8, conv_kernel=3, step_limits=(0.02, 0.9))
MODELS = {
    "mamba": (LayerSpec(mixer=GROUPED, mlp=None, norm=NORM),) * 3,
    "hybrid": (
        *(LayerSpec(mixer=SHARED, mlp=MlpSpec(features=64), norm=NORM, residual_scale=0.7),) * 2,
        dataclasses.replace(tiny_layer(num_kv_heads=4), residual_scale=0.7),
    )
    * 2,
}
LENGTH = 24
DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))
TOKENS = tiny_batch(rows=4, length=LENGTH)["tokens"][:, :-1]
STRICT = Layout(rules=(*DEFAULT_RULES, ("norm", "tensor")), min_shard=1, tolerance=0)


@functools.cache
def model(name):
    """The model, variables that are far from their initial values, and the slow decoder's logits."""
    module = tiny_decoder(layers=MODELS[name], tie_embeddings=name == "hybrid")
    variables = unboxed(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(variables))))

    def drawn(path, leaf):
        noise = jax.random.normal(next(keys), leaf.shape)
        if path[-1].key in ("A_log", "dt_bias"):
            return leaf + 0.3 * noise
        return leaf + (0.1 if path[-1].key == "kernel" else 0.3) * noise

    variables = jax.tree_util.tree_map_with_path(drawn, variables)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), stack_view(module).unstack(variables)["params"])
    return module, variables, slow_decoder.logits(module, params, TOKENS)


def assert_close(got, want, tolerance=1e-5, what=""):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max(), err_msg=what)


@pytest.mark.parametrize("name", MODELS)
def test_whole_sequences_are_the_slow_decoder(name):
    module, variables, want = model(name)
    assert_close(jax.jit(module.apply)(variables, TOKENS), want)


@pytest.mark.parametrize("name", MODELS)
def test_decoding_with_a_cache_is_the_slow_decoder(name):
    module, variables, want = model(name)
    run = jax.jit(lambda tokens, cache: module.apply(variables, tokens, cache=cache))
    logits, cache = run(TOKENS[:, :7], module.init_cache(len(TOKENS), LENGTH))
    got = [logits]
    for step in range(7, 16):
        logits, cache = run(TOKENS[:, step : step + 1], cache)
        got.append(logits)
    logits, cache = run(TOKENS[:, 16:], cache)  # a later block of several tokens goes on from the state too
    assert_close(np.concatenate([*got, logits], axis=1), want)
    assert int(cache.index) == LENGTH


@pytest.mark.parametrize("name", MODELS)
def test_padding_on_the_left_touches_neither_the_state_nor_the_tail(name):
    module, variables, want = model(name)
    lengths = np.array([LENGTH, 9, 2, 1])
    tokens = np.full((4, LENGTH), 5, np.int32)
    for row, length in enumerate(lengths):
        tokens[row, LENGTH - length :] = TOKENS[row, :length]
    real = np.arange(LENGTH) >= LENGTH - lengths[:, None]

    @jax.jit
    def run(tokens, real, cache):
        return module.apply(variables, tokens, segment_ids=real.astype(jnp.int32), cache=cache)

    cache, parts = module.init_cache(4, 2 * LENGTH), []
    for block in np.split(np.arange(LENGTH), [12, 23]):  # rows begin within the first block, the second and the third
        logits, cache = run(tokens[:, block], real[:, block], cache)
        parts.append(logits)
    got = np.concatenate(parts, axis=1)
    for row, length in enumerate(lengths):
        assert_close(got[row, LENGTH - length :], want[row, :length], what=f"row {row}")
    following = np.array([[1], [TOKENS[1, 9]], [TOKENS[2, 2]], [TOKENS[3, 1]]], np.int32)
    nobody = np.zeros((4, 1), bool)
    _, cache = run(following, nobody, cache)  # a column of padding after the prompts leaves every row as it is
    logits, _ = run(following, ~nobody, cache)
    for row in (1, 2, 3):
        assert_close(logits[row, 0], want[row, lengths[row]], what=f"row {row} goes on")


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_each_document_alone(name):
    module, variables, _ = model(name)
    segments = np.array([[1] * 9 + [2] * 1 + [3] * 10 + [0] * 4] * 4)
    positions = np.concatenate([np.arange(9), np.arange(1), np.arange(10), np.arange(4)])[None].repeat(4, 0)
    run = jax.jit(module.apply)
    got = run(variables, TOKENS, positions=positions, segment_ids=segments)
    for first, last in ((0, 9), (9, 10), (10, 20)):
        assert_close(got[:, first:last], run(variables, TOKENS[:, first:last]), what=f"tokens {first} to {last}")


@pytest.mark.parametrize("name, storage", [("mamba", {"scan_layers": False}), ("hybrid", {"bank_layers": 1})], ids=str)
def test_storage_changes_nothing(name, storage):
    module, variables, want = model(name)
    apart = module.clone(**storage)
    logical = stack_view(module).unstack(variables)
    assert_close(jax.jit(apart.apply)(stack_view(apart).stack(logical), TOKENS), want)


@functools.cache
def loss_and_gradients(name, spec):
    """Loss and gradients per layer of one packed batch, and where the large leaves are."""
    module, variables, _ = model(name)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if spec is None else build_mesh(spec)
    # The backward pass of this mesh computes all of it again, the shifts over sequence included.
    module = module.clone(remat="full") if spec == MESHES["sequence=4 tensor=2"] else module
    run = Trainer(LanguageModel(module), "adamw", mesh=mesh, layout=STRICT)
    placed = run.place(variables).variables
    differentiate = jax.jit(batch_gradients(run.objective, run.shardings().params))
    with run.context():
        output, gradients = differentiate(placed, run.place_batch(packed_batch()), jax.random.key(0))
    large = {path: leaf.sharding.spec for path, leaf in named_leaves(placed).items() if leaf.size >= 512}
    gradients = stack_view(module).unstack({"params": jax.device_get(gradients)})
    return float(output.loss.total), named_leaves(gradients), large


MESHES = {
    "fsdp=2 tensor=2": MeshSpec(fsdp=2, tensor=2),
    "tensor=4": MeshSpec(tensor=4),
    "sequence=4 tensor=2": MeshSpec(sequence=4, tensor=2),
    "sequence=2 tensor=2 fsdp=2": MeshSpec(sequence=2, tensor=2, fsdp=2),
    "stage=2 tensor=2": MeshSpec(stage=2, tensor=2, microbatches=2),
}


@pytest.mark.parametrize(
    "name, mesh",
    [(name, mesh) for name in MODELS for mesh in MESHES if (name, mesh) != ("mamba", "stage=2 tensor=2")],  # 3 layers
)
def test_a_mesh_trains_as_one_device(name, mesh):
    want_loss, want, _ = loss_and_gradients(name, None)
    loss, got, large = loss_and_gradients(name, MESHES[mesh])
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert got.keys() == want.keys()
    for path, gradient in want.items():
        assert np.abs(gradient).max() > 0, f"{path} is zero: the test could not fail"
        assert_close(got[path], gradient, what=path)
    wanted = {axis for axis in ("fsdp", "tensor") if getattr(MESHES[mesh], axis) > 1}
    for path, spec in large.items():
        assert wanted <= {axis for entry in spec for axis in np.atleast_1d(entry) if axis}, f"{path} is placed {spec}"


def test_a_residual_stream_in_float32_keeps_what_bfloat16_rounds_away():
    module, variables, _ = model("mamba")
    embedding = EmbeddingSpec(scale=300.0)  # what the blocks add is small beside it

    def hidden(module, params):
        return jax.jit(lambda params: module.apply({"params": params}, TOKENS, method="hidden_states"))(params)

    def error(layers):
        wide, narrow = (module.clone(layers=layers, embedding=embedding, dtype=dtype) for dtype in DTYPES)
        want, got = (hidden(each, variables["params"]) for each in (wide, narrow))
        assert (want.dtype, got.dtype) == DTYPES
        blocks_only = want - hidden(wide.clone(layers=()), outside)
        return float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(blocks_only))

    outside = {name: part for name, part in variables["params"].items() if not name.startswith("layers")}
    in_float32 = tuple(dataclasses.replace(layer, residual_in_float32=True) for layer in module.layers)
    assert error(in_float32) < 0.75 * error(module.layers)
    weights = stack_view(module).unstack(variables)["params"]["layers_0"]
    layer = DecoderLayer(module.features, in_float32[0])
    x, narrow = jnp.zeros((1, 4, module.features)), jax.tree.map(lambda leaf: leaf.astype("bfloat16"), weights)
    added, *_ = layer.apply({"params": narrow}, x, Surroundings(causal_visibility(4)))
    assert np.abs(added).max() > 0.1
    np.testing.assert_array_equal(added, added.astype("bfloat16").astype("float32"))  # what is added is computed so


@pytest.mark.parametrize("spec", [GROUPED, SHARED], ids=["groups split", "groups whole"])
def test_on_a_tensor_mesh_a_layer_sends_its_output_and_the_sums_of_its_norm(spec):
    module = tiny_decoder(layers=(LayerSpec(mixer=spec, mlp=None, norm=NORM),) * 3)
    mesh = build_mesh(MeshSpec(tensor=4), jax.devices()[:4])
    trainer = Trainer(LanguageModel(module), "adamw", mesh=mesh, layout=Layout(min_shard=1, tolerance=1.0))
    B, T = 4, 24
    found = tool.step_report(trainer, {"tokens": np.ones((B, T + 1), np.int32)}).found
    looped = [item for item in found if item.trips and item.group_size > 1]
    assert {(item.axes, item.trips) for item in looped} == {(("tensor",), (3,))}
    gathered = {int(np.prod(shape)) for item in looped if item.kind == "all-gather" for shape in item.shapes}
    # Groups that do not divide are stored in parts, and every device's heads read them all: 32 is the width.
    P, W = spec.state_size, spec.conv_kernel
    assert gathered <= ({32 * P, B * T * P, P * W, P} if spec is SHARED else set())
    reduced = [item for item in looped if item.kind == "all-reduce"]
    forward = sorted(int(np.prod(shape)) for item in reduced if item.phase == "forward" for shape in item.shapes)
    assert forward == sorted([B * T * 32, B * T * spec.norm_groups])
    largest = max(int(np.prod(shape)) for item in looped for shape in item.shapes)
    assert largest == B * T * 32


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_groups": 3}, "num_heads a multiple of num_groups.* num_groups=3"),
        ({"norm_groups": 5}, "norm_groups=5"),
        ({"state_size": 0}, "positive sizes.* state_size=0"),
        ({"activation": "tanh"}, "activation must be one of .* Received: activation='tanh'"),
        ({"norm_eps": 0.0}, "positive eps. Received: norm_eps=0.0"),
        ({"step_limits": (0.5, 0.1)}, r"0 <= low < high. Received: step_limits=\(0.5, 0.1\)"),
    ],
)
def test_specs_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GROUPED, **fields)


def test_a_block_says_what_it_is_not():
    layer = MODELS["mamba"][0]
    with pytest.raises(ValueError, match=r"the block has no AttentionSpec\. Received: mixer=Mamba2Spec"):
        _ = layer.attention
    with pytest.raises(ValueError, match=r"without an mlp has nothing in parallel\. Received: placement='parallel'"):
        dataclasses.replace(layer, placement="parallel")


def test_a_sequence_that_the_mesh_cannot_cut_is_refused():
    module, variables, _ = model("mamba")
    with jax.set_mesh(build_mesh(MeshSpec(sequence=8))), pytest.raises(LayoutRefused, match="Received: length=16"):
        jax.eval_shape(module.apply, variables, TOKENS[:, :16])

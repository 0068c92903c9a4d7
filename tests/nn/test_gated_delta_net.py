"""Hybrids of gated delta nets and attention: the slow decoder's numbers, decoding, padding, documents, every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.block import LayerSpec
from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec
from dew.nn.sharding import unboxed
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.placement.stacks import stack_view
from dew.planning.flops import decoder_step_flops
from dew.training.step import batch_gradients
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.nn import slow_decoder
from tests.parallel.sequences import packed_batch
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

NORM = NormSpec(eps=1e-5, offset=1.0, cast="after_scale")
DELTA = GatedDeltaNetSpec(num_heads=8, head_dim=6, num_keys=4, key_dim=8)
ATTENTION = tiny_layer(num_kv_heads=4, gate=True, qk_norm=NORM, rotary=RotarySpec(theta=100.0, fraction=0.5)).attention
LAYERS = tuple(LayerSpec(mixer=mixer, mlp=MlpSpec(features=64), norm=NORM) for mixer in (DELTA, ATTENTION)) * 2
LENGTH = 24
TOKENS = tiny_batch(rows=4, length=LENGTH)["tokens"][:, :-1]
STRICT = Layout(rules=(*DEFAULT_RULES, ("norm", "tensor")), min_shard=1, tolerance=0)


@functools.cache
def model():
    """The model, variables that are far from their initial values, and the slow decoder's logits."""
    module = tiny_decoder(layers=LAYERS, norm=NORM)
    variables = unboxed(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(variables))))

    def drawn(path, leaf):
        noise = jax.random.normal(next(keys), leaf.shape)
        if path[-1].key == "A_log":
            return 0.5 * noise - 1.0
        return leaf + (0.15 if path[-1].key == "kernel" else 0.3) * noise

    variables = jax.tree_util.tree_map_with_path(drawn, variables)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), stack_view(module).unstack(variables)["params"])
    return module, variables, slow_decoder.logits(module, params, TOKENS)


def assert_close(got, want, tolerance=1e-5, what=""):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max(), err_msg=what)


def test_whole_sequences_are_the_slow_decoder():
    module, variables, want = model()
    assert_close(jax.jit(module.apply)(variables, TOKENS), want)


@pytest.mark.parametrize("mesh", [None, MeshSpec(tensor=2, sequence=2)], ids=str)
def test_decoding_with_a_cache_is_the_slow_decoder(mesh):
    module, variables, want = model()
    with jax.set_mesh(build_mesh(MeshSpec(), jax.devices()[:1]) if mesh is None else build_mesh(mesh)):
        run = jax.jit(lambda tokens, cache: module.apply(variables, tokens, cache=cache))
        logits, cache = run(TOKENS[:, :7], module.init_cache(len(TOKENS), LENGTH))
        got = [logits]
        for step in range(7, 14):
            logits, cache = run(TOKENS[:, step : step + 1], cache)
            got.append(logits)
        # A later block of several tokens goes on from the state too.
        for block in (TOKENS[:, 14:21], TOKENS[:, 21:22], TOKENS[:, 22:23], TOKENS[:, 23:]):
            logits, cache = run(block, cache)
            got.append(logits)
    assert_close(np.concatenate(got, axis=1), want)
    assert int(cache.index) == LENGTH


def test_padding_on_the_left_touches_neither_the_state_nor_the_tail():
    module, variables, want = model()
    lengths = np.array([LENGTH, 9, 2, 1])
    tokens = np.full((4, LENGTH), 5, np.int32)
    for row, length in enumerate(lengths):
        tokens[row, LENGTH - length :] = TOKENS[row, :length]
    real = np.arange(LENGTH) >= LENGTH - lengths[:, None]

    @jax.jit
    def run(tokens, real, cache):
        return module.apply(variables, tokens, segment_ids=real.astype(jnp.int32), cache=cache)

    cache, parts = module.init_cache(4, 2 * LENGTH), []
    for block in np.split(np.arange(LENGTH), 2):  # rows begin within the first block and within the second
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


def test_packed_documents_are_each_document_alone():
    module, variables, want = model()
    order = np.concatenate([np.arange(9), np.arange(1), np.arange(10), np.arange(4)])
    segments = np.array([[1] * 9 + [2] * 1 + [3] * 10 + [0] * 4] * 4)
    got = jax.jit(module.apply)(variables, TOKENS[:, order], positions=order[None].repeat(4, 0), segment_ids=segments)
    for first, last in ((0, 9), (9, 10), (10, 20)):
        assert_close(got[:, first:last], want[:, : last - first], what=f"tokens {first} to {last}")


def test_three_delta_nets_and_an_attention_are_one_loop():
    module = tiny_decoder(layers=(*LAYERS[:1] * 3, LAYERS[1]) * 3)
    stored = [bank.layers for bank in stack_view(module).banks]
    assert stored == [tuple(f"layers_{place + 4 * turn}" for turn in range(3)) for place in range(4)]


def test_storage_changes_nothing():
    module, variables, want = model()
    apart = module.clone(scan_layers=False)
    logical = stack_view(module).unstack(variables)
    assert_close(jax.jit(apart.apply)(stack_view(apart).stack(logical), TOKENS), want)


@functools.cache
def loss_and_gradients(spec):
    """Loss and gradients per layer of one packed batch, and where the large leaves are."""
    module, variables, _ = model()
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
    "sequence=4 tensor=2": MeshSpec(sequence=4, tensor=2),
    "stage=2 tensor=2": MeshSpec(stage=2, tensor=2, microbatches=2),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_trains_as_one_device(mesh):
    want_loss, want, _ = loss_and_gradients(None)
    loss, got, large = loss_and_gradients(MESHES[mesh])
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert got.keys() == want.keys()
    for path, gradient in want.items():
        assert np.abs(gradient).max() > 0, f"{path} is zero: the test could not fail"
        assert_close(got[path], gradient, 2e-5, what=path)
    wanted = {axis for axis in ("fsdp", "tensor") if getattr(MESHES[mesh], axis) > 1}
    for path, spec in large.items():
        assert wanted <= {axis for entry in spec for axis in np.atleast_1d(entry) if axis}, f"{path} is placed {spec}"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_keys": 3}, "num_heads a multiple of num_keys.* num_keys=3"),
        ({"key_dim": 0}, "positive sizes.* key_dim=0"),
        ({"activation": "tanh"}, "activation must be one of .* Received: activation='tanh'"),
        ({"norm_eps": 0.0}, "positive eps. Received: norm_eps=0.0"),
    ],
)
def test_specs_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DELTA, **fields)


def test_a_sequence_that_the_mesh_cannot_cut_is_refused():
    module, variables, _ = model()
    with jax.set_mesh(build_mesh(MeshSpec(sequence=8))), pytest.raises(LayoutRefused, match="Received: length=16"):
        jax.eval_shape(module.apply, variables, TOKENS[:, :16])


def test_keys_that_a_tensor_axis_does_not_divide_are_refused_with_their_number():
    module, _, _ = model()
    abstract = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    layout, mesh = Layout(min_shard=1, tolerance=0), build_mesh(MeshSpec(tensor=8))
    with pytest.raises(LayoutRefused, match="4 heads of the scan do not divide tensor=8"):
        layout.check(mesh, abstract, layout.shardings(mesh, abstract))


def test_the_formula_of_operations_refuses_the_mixer_by_name():
    module, variables, _ = model()
    with pytest.raises(ValueError, match=r"counts attention alone\. .*program_flops.* Received: .*GatedDeltaNetSpec"):
        decoder_step_flops(module, variables, rows=1, length=8)

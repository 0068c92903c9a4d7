"""Every kind of block and both ends of the decoder compute what a slow decoder in NumPy does, however they are run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.backbones.banks import Segment, bank_name, segments
from dew.nn.backbones.causal_transformer import LayerSpec
from dew.nn.embed import EmbeddingSpec, HeadSpec, project, scaled_rows
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec
from dew.nn.sharding import unboxed
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.stacks import stack_view
from dew.tree import named_leaves
from tests.nn import slow_decoder
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

BATCH = tiny_batch(rows=4, length=12)
TOKENS = BATCH["tokens"][:, :-1]
GEMMA_NORM = NormSpec(eps=1e-5, offset=1.0, cast="after_scale")
LAYER_NORM = NormSpec(eps=1e-5, kind="layer", cast="after_scale")
BIASED_NORM = dataclasses.replace(LAYER_NORM, bias=True)
PLAIN = MlpSpec(features=64, activation="gelu", bias=True, gated=False)


def block(placement="pre", norm=None, mlp=None, residual_scale=1.0, **attention):
    """A tiny block; the rest are fields of its attention."""
    base = tiny_layer(**attention)
    return LayerSpec(
        mixer=base.attention,
        mlp=mlp or base.mlp,
        norm=norm or base.norm,
        placement=placement,
        residual_scale=residual_scale,
    )


def _gemma2():
    mlp = MlpSpec(features=64, activation="gelu_tanh")
    shared = {"norm": GEMMA_NORM, "mlp": mlp, "scale": 0.5, "softcap": 1.5, "qk_norm": GEMMA_NORM}
    local = block("both", window=4, rotary=RotarySpec(theta=100.0), **shared)
    layers = (local, block("both", **shared)) * 2 + (local,)
    ends = {"embedding": EmbeddingSpec(scale=32**0.5, round_scale=True), "head": HeadSpec(softcap=2.0)}
    return tiny_decoder(layers=layers, norm=GEMMA_NORM, **ends)


def _cohere2():
    rotary = RotarySpec(theta=1e4, interleaved=True, in_float32=True)
    local = block("parallel_one_norm", LAYER_NORM, window=5, rotary=rotary)
    layers = (local, local, block("parallel_one_norm", LAYER_NORM, rotary=None)) * 2
    return tiny_decoder(layers=layers, norm=LAYER_NORM, head=HeadSpec(scale=0.25))


def _olmo2():
    norm = NormSpec(eps=1e-5, cast="after_scale")
    # With gated heads, which it has not: no other variant needs programs of its own for them.
    layer = block("post", norm, qk_norm=norm, qk_norm_over="projection", gate=True)
    return tiny_decoder(layers=(layer,) * 3, norm=norm, tie_embeddings=False)


def _neox():
    layer = block("parallel", BIASED_NORM, PLAIN, bias=True, out_bias=True, rotary=RotarySpec(theta=1e4, fraction=0.25))
    return tiny_decoder(layers=(layer,) * 2, norm=BIASED_NORM, tie_embeddings=False)


def _gpt2():
    mlp = dataclasses.replace(PLAIN, activation="gelu_tanh")
    layer = block("pre", BIASED_NORM, mlp, bias=True, out_bias=True, rotary=None)
    return tiny_decoder(layers=(layer,) * 2, norm=BIASED_NORM, embedding=EmbeddingSpec(positions=64))


def _granite():
    layer = block(residual_scale=0.22, scale=0.7)
    return tiny_decoder(layers=(layer,) * 2, embedding=EmbeddingSpec(scale=12.0), head=HeadSpec(scale=1 / 6))


def _chunks_and_sinks():
    layers = (block(chunk=5, sinks=True), block(window=4, sinks=True), block(chunk=8, window=3))
    return tiny_decoder(layers=layers)


VARIANTS = {
    "chunks_and_sinks": _chunks_and_sinks,
    "gemma2": _gemma2,
    "cohere2": _cohere2,
    "olmo2": _olmo2,
    "neox": _neox,
    "gpt2": _gpt2,
    "granite": _granite,
}


@functools.cache
def variant(name):
    """The model, variables that are far from their initial values, and the slow decoder's logits."""
    module = VARIANTS[name]()
    variables = unboxed(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    leaves, structure = jax.tree.flatten(variables)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        (0.3 if leaf.ndim > 2 else 0.5) * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    variables = structure.unflatten(drawn)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), stack_view(module).unstack(variables)["params"])
    return module, variables, slow_decoder.logits(module, params, TOKENS)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_whole_sequences_are_the_slow_decoder(name):
    module, variables, want = variant(name)

    @jax.jit
    def both(variables):
        hidden = module.apply(variables, TOKENS, method="hidden_states")
        return module.apply(variables, TOKENS), module.logits(variables, hidden)

    for logits in both(variables):
        assert_close(logits, want)


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_with_a_cache_is_the_slow_decoder(name):
    module, variables, want = variant(name)
    run = jax.jit(lambda tokens, cache: module.apply(variables, tokens, cache=cache))
    logits, cache = run(TOKENS[:, :7], module.init_cache(len(TOKENS), 16))
    got = [logits]
    for step in range(7, TOKENS.shape[1]):
        logits, cache = run(TOKENS[:, step : step + 1], cache)
        got.append(logits)
    assert_close(np.concatenate(got, axis=1), want)


@pytest.mark.parametrize("name", ["gemma2", "cohere2"])
@pytest.mark.parametrize("storage", [{"scan_layers": False}, {"bank_layers": 1}], ids=str)
def test_patterns_of_layers_compute_the_same_stored_apart(name, storage):
    module, variables, want = variant(name)
    apart = module.clone(**storage)
    logical = stack_view(module).unstack(variables)
    assert_close(jax.jit(apart.apply)(stack_view(apart).stack(logical), TOKENS), want)


def test_left_padding_does_not_move_a_window():
    module, variables, want = variant("gemma2")
    padding = 5
    tokens = np.pad(TOKENS, ((0, 0), (padding, 0)))
    real = np.broadcast_to(np.arange(tokens.shape[1]) >= padding, tokens.shape).astype(np.int32)
    run = jax.jit(lambda variables, cache: module.apply(variables, tokens, segment_ids=real, cache=cache))
    got, _ = run(variables, module.init_cache(len(tokens), 20))
    assert_close(got[:, padding:], want)


def language_loss(module, variables, mesh):
    """Loss and gradients of one batch under a mesh, per layer."""
    objective = LanguageModel(module)
    batch = objective.prepare(BATCH)

    def loss(variables):
        return objective.loss(variables, batch, key=jax.random.key(0), train=True).loss.total

    with jax.set_mesh(mesh):
        total, gradients = jax.jit(jax.value_and_grad(loss))(variables)
    return float(total), named_leaves(stack_view(module).unstack(gradients))


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "olmo2", "gpt2"])
def test_training_on_a_mesh_is_training_on_one_device(name):
    module, variables, logits = variant(name)
    one = build_mesh(MeshSpec(), jax.devices()[:1])
    want, gradients = language_loss(module, variables, one)
    logits = logits - logits.max(-1, keepdims=True)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, BATCH["tokens"][:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(want, (losses * BATCH["loss_mask"][:, 1:]).sum(), rtol=1e-5)
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2))
    shardings = Layout(min_shard=1, tolerance=1.0).shardings(
        mesh, jax.eval_shape(module.init, jax.random.key(0), TOKENS)
    )
    total, got = language_loss(module, jax.device_put(variables, shardings), mesh)
    np.testing.assert_allclose(total, want, rtol=1e-5)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for path, gradient in gradients.items():
        scale = np.abs(gradient).max()
        if path.endswith("k_proj/bias") and module.layers[0].attention.rotary is None:
            assert scale < 1e-6 * largest, "a bias that all keys share moves no softmax"
            continue
        assert scale > 1e-4 * largest, path
        np.testing.assert_allclose(got[path], gradient, rtol=0, atol=2e-5 * scale, err_msg=path)


def test_a_window_of_w_tokens_reads_w_tokens_with_itself():
    module = tiny_decoder(layers=(tiny_layer(window=4),))
    variables, run = unboxed(jax.jit(module.init)(jax.random.key(0), TOKENS)), jax.jit(module.apply)
    changed = np.array(TOKENS)
    changed[:, 3] += 1
    moved = np.abs(run(variables, TOKENS) - run(variables, changed)).max((0, 2)) > 1e-7
    assert moved.tolist() == [False] * 3 + [True] * 4 + [False] * 5


def test_long_sequences_keep_the_window_in_chunks():
    module = tiny_decoder(layers=(tiny_layer(window=40),), max_length=1024)
    variables = unboxed(jax.jit(module.init)(jax.random.key(0), TOKENS))
    tokens = np.random.default_rng(0).integers(1, 60, (1, 600)).astype(np.int32)
    got = jax.jit(module.apply)(variables, tokens)
    # One layer: what the last token reads is the window before it alone.
    alone = jax.jit(module.apply)(variables, tokens[:, -40:], positions=np.arange(560, 600)[None])
    np.testing.assert_allclose(got[:, -1], alone[:, -1], atol=1e-5 * float(np.abs(alone).max()))


A, B = "local", "global"


@pytest.mark.parametrize(
    "layers, bank_layers, want",
    [
        ((A,) * 5, None, [(0, 1, 5)]),
        ((A, B) * 13, None, [(0, 2, 13)]),
        ((A, A, A, A, A, B) * 4 + (A, A), None, [(0, 6, 4), (24, 1, 2)]),
        ((A, A, A, A, A, B) * 2, None, [(0, 6, 2)]),
        ((A, A, A, A, A, B) * 2 + (A,), None, [(0, 1, 5), (5, 1, 1), (6, 1, 5), (11, 1, 1), (12, 1, 1)]),
        ((A, A, B, B) * 2, 1, [(index, 1, 1) for index in range(8)]),
        ((A, A, B, A, A), None, [(0, 1, 2), (2, 1, 1), (3, 1, 2)]),
        ((B,) + (A, B) * 4, 3, [(0, 2, 3), (6, 1, 1), (7, 1, 1), (8, 1, 1)]),
        ((A,) * 5, 2, [(0, 1, 2), (2, 1, 2), (4, 1, 1)]),
    ],
)
def test_segments_compile_as_few_blocks_as_they_can_and_are_one_loop_where_all_layers_repeat(layers, bank_layers, want):
    got = segments(layers, True, bank_layers)
    assert got == tuple(Segment(*each) for each in want)
    stored = [index for segment in got for run in segment.runs for index in run]
    assert sorted(stored) == list(range(len(layers)))
    assert len({bank_name(run) for segment in got for run in segment.runs}) == sum(s.period for s in got)


def test_a_pattern_is_stored_by_place_and_titled_with_its_step():
    view = stack_view(_gemma2())
    assert [(bank.name, bank.layers) for bank in view.banks] == [
        ("layers_0_2_2", ("layers_0", "layers_2")),
        ("layers_1_3_2", ("layers_1", "layers_3")),
    ]
    assert view.title("params/layers_1_3_2/mlp/up_proj/kernel") == "params/layers_1..3:2/mlp/up_proj/kernel"


def test_factors_are_rounded_where_the_spec_says():
    rows = jax.random.normal(jax.random.key(0), (1, 9, 32), jnp.bfloat16)
    wide = np.asarray(rows, np.float32)
    factor = np.float32(48**0.5)
    rounded = np.asarray(jnp.asarray(factor, jnp.bfloat16), np.float32)
    for round_scale, want in ((True, wide * rounded), (False, wide * factor)):
        got = scaled_rows(rows, EmbeddingSpec(scale=48**0.5, round_scale=round_scale))
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want.astype(jnp.bfloat16), np.float32))
    assert not np.array_equal(wide * rounded, wide * factor)


def test_the_bound_follows_the_factor():
    hidden, table = jax.random.normal(jax.random.key(0), (1, 2, 8)), jax.random.normal(jax.random.key(1), (5, 8))
    products = np.asarray(hidden) @ np.asarray(table).T
    got = project(hidden, table, HeadSpec(scale=3.0, softcap=2.0))
    np.testing.assert_allclose(got, 2 * np.tanh(3 * products / 2), rtol=1e-5)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: block("sandwich"), "placement must be one of pre, post, both, .* Received: placement='sandwich'"),
        (lambda: tiny_layer(window=0), "window must hold a token or more.* Received: window=0"),
        (lambda: tiny_layer(softcap=0.0), r"softcap must be positive.* Received: softcap=0\.0"),
        (lambda: HeadSpec(softcap=-1.0), r"softcap must be positive.* Received: softcap=-1\.0"),
        (lambda: tiny_decoder(embedding=EmbeddingSpec(positions=63)), "context of 64 .* Received: positions=63"),
        (lambda: EmbeddingSpec(positions=0), r"a table of positions needs a row or more\. Received: positions=0"),
        (lambda: RotarySpec(theta=1e4, fraction=0.0), r"rotary fraction must be in \(0, 1\]\. Received: fraction=0\.0"),
        (lambda: tiny_layer().experts, r"the block has no experts\. Received: mlp=MlpSpec"),
    ],
)
def test_specs_that_mean_nothing_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()

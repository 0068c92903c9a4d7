"""Latent attention: the slow decoder's numbers, a cache of latents read both ways, documents, every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dew.inference import generate
from dew.inference.prefill import cache_shardings
from dew.kernels.attention_choice import Accelerator
from dew.nn.attention_report import attention_report, cache_report
from dew.nn.exchange_report import exchange_report
from dew.nn.latent_attention import LatentAttentionSpec, attention_form
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.moe import ExpertsSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec, YarnScaling
from dew.nn.router import RouterSpec, RouterTraining
from dew.nn.sharding import unboxed
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.placement.stacks import stack_view
from dew.planning import estimate_bytes
from dew.training.step import batch_gradients
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.nn import slow_decoder
from tests.parallel.sequences import packed_batch
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

NORM = NormSpec(eps=1e-6)
NARROW = LatentAttentionSpec(
    num_heads=4,
    kv_lora_rank=12,
    q_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    norm=NORM,
    rotary=RotarySpec(theta=100.0, interleaved=True),
)
WIDE = dataclasses.replace(
    NARROW, q_lora_rank=None, qk_nope_head_dim=4, v_head_dim=16, bias=True, rotary=RotarySpec(theta=100.0)
)
GROUPED = RouterSpec(
    top_k=2, score="sigmoid", normalise=True, scale=2.5, groups=4, top_groups=2, group_score="top2", balance_bias=True
)
DENSE = dataclasses.replace(tiny_layer(num_kv_heads=4), mixer=NARROW)
SPARSE = dataclasses.replace(
    DENSE,
    mlp=ExpertsSpec(num_experts=8, features=16, router=GROUPED, shared=dataclasses.replace(DENSE.mlp, features=16)),
)
MODELS = {
    "narrow": (DENSE,) * 4,
    "beside": (dataclasses.replace(DENSE, mixer=WIDE), tiny_layer(num_kv_heads=4)) * 2,
    "experts": (DENSE, SPARSE, SPARSE),
}
TRAINING = RouterTraining(balance_loss=0.1, bias_rate=0.01)
SLOW = ("narrow", "beside")
LENGTH = 24
TOKENS = tiny_batch(rows=4, length=LENGTH)["tokens"][:, :-1]
STRICT = Layout(rules=(*DEFAULT_RULES, ("norm", "tensor")), min_shard=1, tolerance=0)
ROUTED = dataclasses.replace(STRICT, rules=(*STRICT.rules, ("router", "tensor")))


@functools.cache
def model(name):
    """The model, and variables that are far from their initial values."""
    training = {"router_training": TRAINING} if name == "experts" else {}
    module = tiny_decoder(layers=MODELS[name], tie_embeddings=name != "beside", **training)
    variables = unboxed(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(variables))))

    def drawn(path, leaf):
        scale = 0.3 if path[-1].key == "kernel" and path[-2].key != "router" else 0.5
        return leaf + scale * jax.random.normal(next(keys), leaf.shape)

    return module, jax.tree_util.tree_map_with_path(drawn, variables)


@functools.cache
def slow_logits(name):
    module, variables = model(name)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), stack_view(module).unstack(variables)["params"])
    return slow_decoder.logits(module, params, TOKENS)


def assert_close(got, want, tolerance=1e-5, what=""):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max(), err_msg=what)


@pytest.mark.parametrize("name", SLOW)
def test_whole_sequences_are_the_slow_decoder(name):
    module, variables = model(name)
    assert_close(jax.jit(module.apply)(variables, TOKENS), slow_logits(name))


@pytest.mark.parametrize("name", SLOW)
def test_decoding_reads_latents_as_they_are_or_expanded_and_is_the_slow_decoder(name):
    module, variables = model(name)
    spec = module.layers[0].mixer
    assert (spec.absorbs(16, LENGTH), spec.absorbs(1, LENGTH)) == (False, True)
    run = jax.jit(lambda tokens, cache: module.apply(variables, tokens, cache=cache))
    got, cache = [], module.init_cache(len(TOKENS), LENGTH)
    for first, last in ((0, 16), *((step, step + 1) for step in range(16, LENGTH))):
        logits, cache = run(TOKENS[:, first:last], cache)
        got.append(logits)
    assert_close(np.concatenate(got, axis=1), slow_logits(name))
    kept = 12 + 4
    assert cache.banks[0].latents.shape == (sum(layer.mixer == spec for layer in module.layers), 4, LENGTH, kept)


def test_few_tokens_read_latents_as_they_are_and_many_expand_them():
    published = LatentAttentionSpec(
        num_heads=128,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        norm=NORM,
        rotary=RotarySpec(theta=1e4),
    )
    assert published.absorbs(1, 128)
    assert published.absorbs(32, 4096)
    assert not published.absorbs(4096, 4096)
    assert published.absorbs(1, 1) is False, "one token of its own is one token expanded"


def test_padding_on_the_left_is_not_read():
    module, variables = model("narrow")
    lengths = np.array([LENGTH, 9, 2, 1])
    tokens = np.full((4, LENGTH), 5, np.int32)
    for row, length in enumerate(lengths):
        tokens[row, LENGTH - length :] = TOKENS[row, :length]
    real = np.arange(LENGTH) >= LENGTH - lengths[:, None]

    @jax.jit
    def run(tokens, real, cache):
        return module.apply(variables, tokens, segment_ids=real.astype(jnp.int32), cache=cache)

    logits, cache = run(tokens, real, module.init_cache(4, LENGTH + 4))
    for row, length in enumerate(lengths):
        assert_close(logits[row, LENGTH - length :], slow_logits("narrow")[row, :length], what=f"row {row}")
    following = np.array([[1], [TOKENS[1, 9]], [TOKENS[2, 2]], [TOKENS[3, 1]]], np.int32)
    logits, _ = run(following, np.ones((4, 1), bool), cache)
    for row in (1, 2, 3):
        assert_close(logits[row, 0], slow_logits("narrow")[row, lengths[row]], what=f"row {row} goes on")


def test_packed_documents_are_each_document_alone():
    module, variables = model("narrow")
    segments = np.array([[1] * 9 + [2] * 1 + [3] * 10 + [0] * 4] * 4)
    positions = np.concatenate([np.arange(9), np.arange(1), np.arange(10), np.arange(4)])[None].repeat(4, 0)
    run = jax.jit(module.apply)
    got = run(variables, TOKENS, positions=positions, segment_ids=segments)
    for first, last in ((0, 9), (9, 10), (10, 20)):
        assert_close(got[:, first:last], run(variables, TOKENS[:, first:last]), what=f"tokens {first} to {last}")


@functools.cache
def loss_and_gradients(name, spec):
    """Loss and gradients per layer of one packed batch, and where the large leaves are."""
    module, variables = model(name)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if spec is None else build_mesh(spec)
    layout = ROUTED if name == "experts" else STRICT
    run = Trainer(LanguageModel(module), "adamw", mesh=mesh, layout=layout)
    placed = run.place(variables).variables
    differentiate = jax.jit(batch_gradients(run.objective, run.shardings().params))
    with run.context():
        output, gradients = differentiate(placed, run.place_batch(packed_batch()), jax.random.key(0))
    large = {path: leaf.sharding.spec for path, leaf in named_leaves(placed).items() if leaf.size >= 512}
    gradients = stack_view(module).unstack({"params": jax.device_get(gradients)})
    return float(output.loss.total), named_leaves(gradients), large


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("narrow", MeshSpec(sequence=2, tensor=2, fsdp=2)),
        ("narrow", MeshSpec(stage=2, tensor=4, microbatches=2)),
        ("beside", MeshSpec(sequence=4, tensor=2)),
        ("experts", MeshSpec(expert=2, fsdp=2, tensor=2)),
    ],
    ids=str,
)
def test_a_mesh_trains_as_one_device(name, mesh):
    want_loss, want, _ = loss_and_gradients(name, None)
    loss, got, large = loss_and_gradients(name, mesh)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert got.keys() == want.keys()
    for path, gradient in want.items():
        assert np.abs(gradient).max() > 0, f"{path} is zero: the test could not fail"
        assert_close(got[path], gradient, 2e-5, what=path)  # the weights are large, and so is float32's own rounding
    wanted = {axis for axis in ("fsdp", "tensor") if getattr(mesh, axis) > 1}
    for path, spec in large.items():
        assert wanted <= {axis for entry in spec for axis in np.atleast_1d(entry) if axis}, f"{path} is placed {spec}"


@functools.cache
def greedy(name):
    """Greedy tokens of one device from the whole rows, run again for every token, without a cache."""
    module, variables = model(name)
    run, count = jax.jit(module.apply), 8
    rows = np.concatenate([TOKENS[:, :12], np.zeros((4, count), np.int32)], axis=1)
    for step in range(12, 12 + count):
        rows[:, step] = np.argmax(run(variables, rows)[:, step - 1], axis=-1)
    return tuple(tuple(row) for row in rows[:, 12:].tolist())


@pytest.mark.parametrize(
    "name, spec",
    [("narrow", None), ("narrow", MeshSpec(fsdp=2, tensor=2)), ("experts", MeshSpec(sequence=2, tensor=4))],
)
def test_greedy_on_every_mesh_is_the_full_forward_repeated(name, spec):
    module, variables = model(name)
    prompts, options = TOKENS[:, :12].tolist(), {"max_new_tokens": 8}
    if spec is not None:
        mesh = build_mesh(spec)
        shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        variables = jax.device_put(variables, STRICT.shardings(mesh, shapes))
        options |= {"mesh": mesh, "layout": STRICT}
    got = generate(module, variables, prompts, **options)
    assert got.tokens == greedy(name)
    assert max(len(set(row)) for row in got.tokens) > 3, "the law says little about a model that repeats itself"


def test_latents_are_split_by_rows_alone_and_counted():
    module, _ = model("beside")
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2))
    latents, keys = cache_shardings(module, mesh, DEFAULT_RULES, 8, 128).banks
    assert latents.latents.spec == PartitionSpec(None, ("data", "fsdp"))
    assert keys.keys.spec == PartitionSpec(None, ("data", "fsdp"), "tensor")
    # Rows over 4 devices; two layers of 16 numbers a token, two of keys and values of 32, half of them a device.
    assert (
        estimate_bytes(module, mesh, STRICT, rows=8, slots=128).cache == 2 * 128 * 4 * (2 * 16 + 2 * 32) + 2 * 128 + 4
    )


def test_the_reports_say_which_kernel_and_exchange_the_expanded_heads_take():
    module, _ = model("beside")
    gpu = Accelerator(platform="cuda", capability=(9, 0), cudnn=90000)
    narrow = module.clone(dtype="bfloat16", layers=MODELS["narrow"])
    assert "heads are 12 wide" in attention_report(narrow, num_tokens=64, device=gpu)[0]
    lines = attention_report(module.clone(dtype="bfloat16"), num_tokens=64, device=gpu)
    assert [line.split(" (")[0] for line in lines] == ["attention of 2 layers of 64 tokens, bfloat16: cudnn"] * 2
    (line,) = cache_report(module, mesh=build_mesh(MeshSpec(tensor=2)))
    assert line.startswith("cache of 2 layers: latents without heads over tensor=2: each of the 2 devices")
    lines = exchange_report(module, mesh=build_mesh(MeshSpec(sequence=4)), num_tokens=64)
    assert [line.split(":")[1].split(",")[0] for line in lines] == [" all_to_all"] * 2
    assert attention_form(Mamba2Spec(num_heads=1, head_dim=1, num_groups=1, state_size=1)) is None


def test_yarn_sharpens_the_scale():
    scaling = YarnScaling(factor=40.0, original_max_length=4096, mscale=1.0, mscale_all_dim=1.0)
    spec = dataclasses.replace(NARROW, rotary=RotarySpec(theta=1e4, scaling=scaling))
    assert spec.logit_scale == pytest.approx(12**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert dataclasses.replace(spec, scale=0.5).logit_scale == 0.5
    plain = dataclasses.replace(scaling, mscale_all_dim=None)
    assert dataclasses.replace(spec, rotary=RotarySpec(theta=1e4, scaling=plain)).logit_scale == 12**-0.5


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kv_lora_rank": 0}, "positive sizes. Received: num_heads=4, kv_lora_rank=0"),
        ({"q_lora_rank": 0}, "q_lora_rank=0"),
        ({"qk_rope_head_dim": 3}, "even width. Received: head_dim=3"),
        ({"rotary": RotarySpec(theta=1e4, fraction=0.5)}, "whole part of qk_rope_head_dim.* rotary.fraction=0.5"),
    ],
)
def test_specs_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(NARROW, **fields)

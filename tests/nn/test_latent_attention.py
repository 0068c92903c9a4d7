"""Latent attention: the slow decoder's numbers, a cache of latents read both ways, documents, every mesh."""

import dataclasses
import functools

import numpy as np
import pytest
from jax.sharding import PartitionSpec

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
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.planning import estimate_bytes
from tests.nn.decoder_laws import LENGTH, STRICT, TOKENS, Decoder
from tests.tiny import tiny_decoder, tiny_layer

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
ROUTED = dataclasses.replace(STRICT, rules=(*STRICT.rules, ("router", "tensor")))


@functools.cache
def decoder(name):
    def drawn(path, leaf, noise):
        if path[-1] == "embedding":
            return leaf + noise
        return leaf + (0.15 if path[-1] == "kernel" and path[-2] != "router" else 0.5) * noise

    has_experts = name == "experts"
    training = {"router_training": TRAINING} if has_experts else {}
    module = tiny_decoder(layers=MODELS[name], tie_embeddings=has_experts, **training)
    return Decoder(module, drawn, ROUTED if has_experts else STRICT)


@pytest.mark.parametrize("name", SLOW)
def test_whole_sequences_are_the_slow_decoder(name):
    decoder(name).assert_whole_sequences_are_the_slow_decoder()


@pytest.mark.parametrize("name", SLOW)
def test_decoding_reads_latents_as_they_are_or_expanded_and_is_the_slow_decoder(name):
    spec = MODELS[name][0].mixer
    assert (spec.absorbs(16, LENGTH), spec.absorbs(1, LENGTH)) == (False, True)
    cache = decoder(name).assert_decoding_is_the_slow_decoder((16, *[1] * 8))
    kept = 12 + 4
    assert cache.banks[0].latents.shape == (sum(layer.mixer == spec for layer in MODELS[name]), 4, LENGTH, kept)


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
    decoder("narrow").assert_padding_on_the_left_changes_nothing([])


def test_packed_documents_are_each_document_alone():
    decoder("narrow").assert_packed_documents_are_each_alone()


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
    decoder(name).assert_a_mesh_trains_as_one_device(mesh)


@pytest.mark.parametrize(
    "name, spec",
    [("narrow", None), ("narrow", MeshSpec(fsdp=2, tensor=2)), ("experts", MeshSpec(sequence=2, tensor=4))],
)
def test_greedy_on_every_mesh_is_the_full_forward_repeated(name, spec):
    decoder(name).assert_greedy_is_the_full_forward_repeated(tuple(map(tuple, TOKENS[:, :12].tolist())), 8, spec)


def test_latents_are_split_by_rows_alone_and_counted():
    module = decoder("beside").module
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2))
    latents, keys = cache_shardings(module, mesh, DEFAULT_RULES, 8, 128).banks
    assert latents.latents.spec == PartitionSpec(None, ("data", "fsdp"))
    assert keys.keys.spec == PartitionSpec(None, ("data", "fsdp"), "tensor")
    # Rows over 4 devices; two layers of 16 numbers a token, two of keys and values of 32, half of them a device.
    assert (
        estimate_bytes(module, mesh, STRICT, rows=8, slots=128).cache == 2 * 128 * 4 * (2 * 16 + 2 * 32) + 2 * 128 + 4
    )


def test_the_reports_say_which_kernel_and_exchange_the_expanded_heads_take():
    module = decoder("beside").module
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

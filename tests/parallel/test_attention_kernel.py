"""On a mesh a compiled kernel gets each device's rows and heads, and gives what plain operations give."""

import functools
import re

import jax
import jax._src.cudnn.fused_attention_stablehlo as fused
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dew.kernels import attention_blocks, attention_choice, attention_tpu, attention_xla
from dew.kernels.attention import attention, consecutive_visibility
from dew.parallel.attention_kernel import sharded_attention
from dew.parallel.exchange import sequence_attention
from dew.placement import MeshSpec, build_mesh
from dew.planning.hlo import array_shapes

B, T, H = 4, 128, 64


@pytest.fixture
def calls(monkeypatch):
    """Stand in for a TPU: its kernel is interpreted, and the shapes that it gets are noted."""
    seen = []

    def interpreted(query, key, *rest):
        seen.append((query.shape, key.shape))
        return kernel(query, key, *rest, interpret=True)

    kernel = attention_tpu.tpu_attention
    monkeypatch.setattr(attention_tpu, "tpu_attention", interpreted)
    monkeypatch.setattr(attention_choice, "accelerator", lambda: attention_choice.Accelerator(platform="tpu"))
    return seen


@pytest.mark.parametrize(
    "spec, num_heads, num_kv_heads, sizes",
    [
        (MeshSpec(fsdp=2, tensor=2), 4, 2, ((1, T, 2, H), (1, 1, T, H))),
        (MeshSpec(tensor=4), 8, 2, ((2, T, 2, H), (2, 1, T, H))),  # two key/value heads, of which each device reads one
        (MeshSpec(tensor=4), 12, 3, ((2, T, 3, H), (2, 3, T, H))),
        (MeshSpec(tensor=8), 4, 2, ((4, T, 4, H), (4, 2, T, H))),  # whole on every device
    ],
    ids=str,
)
def test_each_device_runs_the_kernel_on_its_own_part(calls, spec, num_heads, num_kv_heads, sizes):
    mesh = build_mesh(spec)
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (B, T, num_heads, H))
    key, value = (jax.random.normal(k, (B, num_kv_heads, T, H)) for k in keys[1:3])
    sinks = jax.random.normal(keys[3], (num_heads,))
    segments = jnp.sort(jax.random.randint(jax.random.key(5), (B, T), 1, 4), axis=1)
    visibility = consecutive_visibility(T, T, query_segments=segments, key_segments=segments, window=50)

    def loss(of, *inputs):
        *heads, sinks = inputs
        return jnp.sum(jnp.sin(of(*heads, visibility=visibility, scale=0.125, sinks=sinks)))

    plain = functools.partial(attention, implementation="xla")
    want = jax.jit(jax.value_and_grad(functools.partial(loss, plain), (0, 1, 2, 3)))(query, key, value, sinks)
    rows = NamedSharding(mesh, PartitionSpec(("data", "expert", "fsdp")))
    with jax.set_mesh(mesh):
        inputs = [jax.device_put(x, rows) for x in (query, key, value)]
        got = jax.jit(jax.value_and_grad(functools.partial(loss, sharded_attention), (0, 1, 2, 3)))(*inputs, sinks)
    assert set(calls) == {sizes}
    for found, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6 * float(jnp.max(jnp.abs(expected))))


def test_blocks_of_long_rows_are_partitioned_without_moving_anything(monkeypatch):
    monkeypatch.setattr(attention_xla, "DENSE_QUERIES", 1)
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", 8)
    monkeypatch.setattr(attention_blocks, "KEY_BLOCK", 16)
    mesh = build_mesh(MeshSpec(fsdp=4, tensor=2))
    sizes = [(4, 32, 4, 8), (4, 2, 32, 8), (4, 2, 32, 8)]
    specs = [PartitionSpec("fsdp", None, "tensor"), *[PartitionSpec("fsdp", "tensor")] * 2]
    segments = jnp.ones((4, 32), jnp.int32)
    visibility = consecutive_visibility(32, 32, query_segments=segments, key_segments=segments)

    def loss(query, key, value):
        return jnp.sum(jnp.sin(sharded_attention(query, key, value, visibility=visibility, scale=0.5)))

    with jax.set_mesh(mesh):
        places = [NamedSharding(mesh, spec) for spec in specs]
        inputs = [jax.ShapeDtypeStruct(size, jnp.float32, sharding=at) for size, at in zip(sizes, places, strict=True)]
        run = jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=tuple(places))
        text = run.lower(*inputs).compile().as_text()
    assert "while(" in text
    assert re.findall("all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", text) == []


def test_decoding_on_more_devices_than_kv_heads_reads_the_cache_where_it_lies():
    rows, heads, slots, width = 2, 16, 64, 8
    mesh = build_mesh(MeshSpec(tensor=4), jax.devices()[:4])
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (rows, 1, heads, width))
    key, value = (jax.random.normal(k, (rows, 1, slots, width)) for k in keys[1:])

    def attend(of, query, key, value, index):
        visibility = consecutive_visibility(1, slots, query_start=index)
        return of(query, key, value, visibility=visibility, scale=0.5)

    want = attend(attention, query, key, value, jnp.int32(40))
    with jax.set_mesh(mesh):
        inputs = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in ((query, PartitionSpec(None, None, "tensor")), *((x, PartitionSpec()) for x in (key, value)))
        ]
        program = jax.jit(functools.partial(attend, sharded_attention)).lower(*inputs, jnp.int32(40)).compile()
    np.testing.assert_allclose(program(*inputs, jnp.int32(40)), want, rtol=0, atol=1e-6)
    # One key/value head: a copy for each of a device's four query heads would be four times the cache.
    sizes = [np.prod(shape) for _, shape in array_shapes(program.as_text())]
    assert max(sizes) == rows * slots * width


def test_on_whole_rows_inside_an_exchange_the_kernel_gives_what_plain_operations_give(calls):
    shards, length = 2, 256
    mesh = build_mesh(MeshSpec(sequence=shards), jax.devices()[:shards])
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (1, length, 4, H))
    key, value = (jax.random.normal(k, (1, length, 2, H)) for k in keys[1:3])
    sinks = jax.random.normal(keys[3], (4,))
    segments = jnp.sort(jax.random.randint(jax.random.key(5), (1, length), 1, 4), axis=1)
    visibility = consecutive_visibility(length, length, query_segments=segments, key_segments=segments, window=150)

    def results(of):
        def loss(*inputs):
            *heads, sinks = inputs
            return jnp.sum(jnp.sin(of(*heads, visibility=visibility, scale=0.125, softcap=3.0, sinks=sinks)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(query, key, value, sinks)

    want = results(
        lambda q, k, v, **rest: attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), implementation="xla", **rest)
    )
    with jax.set_mesh(mesh):
        got = results(sequence_attention)
    assert set(calls) == {((1, length, 2, H), (1, 1, length, H))}
    for found, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("mesh, of", [({}, sharded_attention), ({"sequence": 2}, sequence_attention)])
def test_a_gpu_runs_cudnn_with_its_window_where_the_choice_says_so(monkeypatch, mesh, of):
    hopper = attention_choice.Accelerator(platform="cuda", capability=(9, 0), cudnn=91000)
    monkeypatch.setattr(attention_choice, "accelerator", lambda: hopper)
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    devices = jax.devices()[: MeshSpec(**mesh).reserved]
    heads = (1, 256, 4, H), (1, 256, 2, H), (1, 256, 2, H)
    heads = heads if mesh else (heads[0], *((1, 2, 256, H),) * 2)
    visibility = functools.partial(consecutive_visibility, 256, 256, window=100)

    def loss(*heads):
        return jnp.sum(of(*heads, visibility=visibility(), scale=0.125).astype(jnp.float32))

    with jax.set_mesh(build_mesh(MeshSpec(**mesh), devices)):
        run = jax.jit(jax.grad(loss, (0, 1, 2)))
        traced = run.trace(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in heads))
        text = traced.lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')
    assert re.findall(r"custom_call @__cudnn\$(\w+)", text) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert set(re.findall(r'"sliding_window_length": (\d+)', text)) == {"100"}
    assert set(re.findall(r'"mask_type": "(\w+)"', text)) == {"CAUSAL"}

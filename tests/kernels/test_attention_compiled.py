"""The compiled kernels: what lowers for GPU and TPU is the kernel, and Pallas' program equals plain XLA operations."""

import re

import jax
import jax._src.cudnn.fused_attention_stablehlo as fused
import jax.numpy as jnp
import numpy as np
import pytest

from dew.kernels.attention import consecutive_visibility, with_sinks
from dew.kernels.attention_cudnn import cudnn_attention
from dew.kernels.attention_tpu import tpu_attention
from dew.kernels.attention_xla import xla_attention

B, T, N, K, H = 2, 256, 4, 2, 64
SEGMENTS = jnp.sort(jax.random.randint(jax.random.key(7), (B, T), 1, 4), axis=1)
SINKS = jnp.array([0.5, -1.0, 2.0, -3.0])
CASES = {
    "causal": ({}, {}),
    "window": ({"window": 100}, {}),
    "chunk": ({"chunk": 100}, {}),
    "packed window": ({"window": 100, "query_segments": SEGMENTS, "key_segments": SEGMENTS}, {}),
    "one row of documents": ({"query_segments": SEGMENTS[:1], "key_segments": SEGMENTS[:1]}, {}),
    "softcap and sinks": ({}, {"softcap": 3.0, "sinks": SINKS}),
}


def heads(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (B, T, N, H), dtype)
    return query, *(jax.random.normal(key, (B, K, T, H), dtype) for key in keys[1:])


def lowered(of, platform):
    """Lower a gradient for a platform that is not here."""
    run = jax.jit(jax.grad(lambda *heads: jnp.sum(of(*heads).astype(jnp.float32)), (0, 1, 2)))
    return run.trace(*heads(jnp.bfloat16)).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("case", CASES)
def test_the_tpu_kernel_equals_xla_in_values_and_gradients(case):
    which, options = CASES[case]
    visibility = consecutive_visibility(T, T, **which)
    softcap, sinks = options.get("softcap"), options.get("sinks")

    def by_xla(query, key, value, sinks):
        mixed, logsumexp = xla_attention(query, key, value, visibility, 0.125, softcap, jnp.dtype(jnp.float32))
        return mixed if sinks is None else with_sinks(mixed, logsumexp, sinks)

    def by_pallas(query, key, value, sinks):
        return tpu_attention(query, key, value, visibility, 0.125, softcap, sinks, interpret=True)

    def results(of):
        def loss(*inputs):
            mixed = of(*inputs)
            return jnp.sum(jnp.sin(mixed)), mixed

        gradients, mixed = jax.jit(jax.grad(loss, (0, 1, 2) if sinks is None else (0, 1, 2, 3), has_aux=True))(
            *heads(), sinks
        )
        return mixed, *gradients

    for got, want in zip(results(by_pallas), results(by_xla), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * float(jnp.max(jnp.abs(want))))


def test_queries_after_the_first_key_are_told_the_offset():
    query, key, value = heads()
    late = query[:, 128:]
    visibility = consecutive_visibility(128, T, query_start=128)
    want, _ = xla_attention(late, key, value, visibility, 0.125, None, jnp.dtype(jnp.float32))
    got = tpu_attention(late, key, value, visibility, 0.125, None, None, interpret=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def test_for_a_tpu_the_forward_and_both_backward_kernels_are_lowered():
    visibility = consecutive_visibility(T, T, window=100, query_segments=SEGMENTS, key_segments=SEGMENTS)
    text = lowered(lambda *heads: tpu_attention(*heads, visibility, 0.125, 3.0, SINKS), "tpu")
    assert re.findall(r"custom_call @(\w+)", text) == ["tpu_custom_call"] * 3
    assert set(re.findall(r'kernel_name = "splash_mha_(fwd|dq|dkv)_segmented', text)) == {"fwd", "dq", "dkv"}


@pytest.mark.parametrize(
    "which, mask, window",
    [
        ({}, None, "0"),
        ({"window": 100}, None, "100"),
        ({"window": 100, "query_segments": SEGMENTS, "key_segments": SEGMENTS}, "256x256", "0"),
        ({"chunk": 100}, "256x256", "0"),
    ],
    ids=["causal", "window", "documents", "chunk"],
)
def test_for_a_gpu_cudnns_kernels_are_lowered_with_their_flags(monkeypatch, which, mask, window):
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    visibility = consecutive_visibility(T, T, **which)
    text = lowered(lambda *heads: cudnn_attention(*heads, visibility, 0.125), "cuda").replace("\\22", '"')
    softmax = "fmhaSoftmax" if mask is None else "fmhaScaleBiasSoftmax"
    assert re.findall(r"custom_call @__cudnn\$(\w+)", text) == [softmax, f"{softmax}Backward"]
    assert set(re.findall(r'"mask_type": "(\w+)"', text)) == {"CAUSAL"}
    assert set(re.findall(r'"sliding_window_length": (\d+)', text)) == {window}
    assert not re.search(rf"tensor<[0-9x]*{T}x{T}xf32>", text), "no logits"
    assert (mask is not None) == bool(re.search(rf"tensor<[0-9x]*{T}x{T}xbf16>", text))

"""Specs of attention and mlp refuse what cannot be computed, and their modules are their formulas."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from dew.nn.attention import AttentionSpec, SelfAttention
from dew.nn.masks import causal_visibility
from dew.nn.mlp import ACTIVATIONS, Mlp, MlpSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec, rotary_tables, rotate
from dew.nn.sharding import unboxed

D, N, K, H, T = 12, 4, 2, 6, 5


def weights_of(module, *inputs):
    variables = unboxed(module.init(jax.random.key(0), *inputs))
    leaves, structure = jax.tree.flatten(variables)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return structure.unflatten(drawn)


@pytest.mark.parametrize("bias, qk_norm, scale", [(False, None, None), (True, NormSpec(eps=1e-5), 0.4)])
def test_attention_is_projections_norms_rotation_and_softmax(bias, qk_norm, scale):
    rotary = RotarySpec(theta=100.0)
    spec = AttentionSpec(
        num_heads=N, num_kv_heads=K, head_dim=H, bias=bias, out_bias=bias, qk_norm=qk_norm, scale=scale, rotary=rotary
    )
    module, x = SelfAttention(D, spec), jax.random.normal(jax.random.key(2), (2, T, D))
    tables = rotary_tables(rotary, H, jnp.arange(T)[None])
    variables = weights_of(module, x, causal_visibility(T), tables)
    got, cache = module.apply(variables, x, causal_visibility(T), tables)
    assert cache is None

    p = variables["params"]

    def projected(name, x):
        y = np.tensordot(x, p[name]["kernel"], 2 if name == "o_proj" else 1)
        return y + p[name]["bias"] if bias else y

    def normed(name, x):
        return x if qk_norm is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p[name]["scale"]

    query = rotate(jnp.asarray(normed("q_norm", projected("q_proj", x))), tables, spec.rotary)
    key = rotate(jnp.asarray(normed("k_norm", projected("k_proj", x))), tables, spec.rotary)
    key, value = (jnp.repeat(heads, N // K, axis=2) for heads in (key, jnp.asarray(projected("v_proj", x))))
    logits = jnp.einsum("BTNH,BSNH->BNTS", query, key) * (H**-0.5 if scale is None else scale)
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), logits, -jnp.inf))
    want = projected("o_proj", jnp.einsum("BNTS,BSNH->BTNH", weights, value))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("bias", [False, True])
def test_the_mlp_is_down_of_the_activated_gate_times_up(activation, bias):
    module = Mlp(D, MlpSpec(features=20, activation=activation, bias=bias))
    x = jax.random.normal(jax.random.key(2), (2, T, D))
    variables = weights_of(module, x)
    p = variables["params"]

    def projected(name, x):
        return x @ p[name]["kernel"] + (p[name]["bias"] if bias else 0)

    gate = projected("gate_proj", x)
    formulas = {
        "silu": lambda x: x / (1 + jnp.exp(-x)),
        "relu": lambda x: jnp.maximum(x, 0),
        "relu_squared": lambda x: jnp.maximum(x, 0) ** 2,
        "gelu_quick": lambda x: x / (1 + jnp.exp(-1.702 * x)),
        "gelu": lambda x: x * 0.5 * (1 + jax.scipy.special.erf(x / np.sqrt(2))),
        "gelu_tanh": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    }
    want = projected("down_proj", formulas[activation](gate) * projected("up_proj", x))
    np.testing.assert_allclose(module.apply(variables, x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads, kv_heads, width", [(4, 3, 8), (0, 1, 8), (4, 2, 0)])
def test_head_counts_are_checked(heads, kv_heads, width):
    message = f"num_heads={heads}, num_kv_heads={kv_heads}, head_dim={width}"
    with pytest.raises(ValueError, match=message):
        AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=width)


def test_what_norms_of_queries_and_keys_span_is_checked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"qk_norm_over must be 'head' or 'projection'\. Received: 'layer'"):
        AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm_over="layer")


def test_a_chunk_holds_a_token():
    with pytest.raises(ValueError, match=r"a chunk must hold a token or more, None for all. Received: chunk=0"):
        AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, chunk=0)


def test_mlp_fields_are_checked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"positive hidden width\. Received: features=0"):
        MlpSpec(features=0)
    with pytest.raises(ValueError, match="activation='swish'"):
        MlpSpec(features=4, activation="swish")

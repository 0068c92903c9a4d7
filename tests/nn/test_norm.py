"""The norm's order of casts is the reference's, bit for bit in bfloat16."""

import jax
import jax.numpy as jnp
import jaxtyping
import ml_dtypes
import numpy as np
import pytest

from dew.nn.norm import Norm, NormSpec
from dew.nn.sharding import unboxed

D = 48


def normalised(spec, x, scale):
    return Norm(D, spec).apply({"params": {"scale": scale}}, x)


def by_hand(x, scale, spec):
    """The reference's statements one after the other, each rounded where the reference rounds."""
    wide = np.asarray(x, np.float32)
    wide = wide / np.sqrt((wide * wide).mean(-1, keepdims=True, dtype=np.float32) + np.float32(spec.eps))
    scale = np.asarray(scale, np.float32) + spec.offset
    if spec.cast == "before_scale":
        return (wide.astype(x.dtype) * scale.astype(x.dtype)).astype(x.dtype)
    return (wide * scale).astype(x.dtype)


@pytest.mark.parametrize("cast", ["before_scale", "after_scale"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_float32_is_the_formula(cast, offset):
    spec = NormSpec(eps=1e-3, offset=offset, cast=cast)
    x, scale = jax.random.normal(jax.random.key(0), (7, D)), jax.random.normal(jax.random.key(1), (D,))
    np.testing.assert_allclose(normalised(spec, x, scale), by_hand(np.asarray(x), scale, spec), rtol=2e-6)


def test_the_order_of_casts_shows_in_bfloat16():
    x = jax.random.normal(jax.random.key(0), (64, D), jnp.bfloat16)
    scale = jax.random.normal(jax.random.key(1), (D,), jnp.bfloat16)
    got = {}
    for cast in ("before_scale", "after_scale"):
        spec = NormSpec(eps=1e-5, cast=cast)
        got[cast] = np.asarray(normalised(spec, x, scale))
        assert got[cast].dtype == ml_dtypes.bfloat16
        # The reciprocal root may differ in its last float32 bit, which seldom moves a rounding to bfloat16.
        assert (got[cast] == by_hand(np.asarray(x), scale, spec)).mean() > 0.995
    assert (got["before_scale"] != got["after_scale"]).mean() > 0.05


@pytest.mark.parametrize("cast", ["before_scale", "after_scale"])
def test_its_gradients_are_those_of_the_formula(cast):
    spec = NormSpec(eps=1e-3, offset=1.0, cast=cast)
    x, scale = jax.random.normal(jax.random.key(0), (7, D)), jax.random.normal(jax.random.key(1), (D,))

    def formula(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-3) * (scale + 1)

    got, want = (
        jax.grad(lambda x, scale, f=f: jnp.sum(jnp.sin(f(x, scale))), (0, 1))(x, scale)
        for f in (lambda x, scale: normalised(spec, x, scale), formula)
    )
    for gradient, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-6 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_norm_subtracts_the_mean_and_rounds_once(bias):
    spec = NormSpec(eps=1e-3, kind="layer", bias=bias, cast="after_scale")
    x = 2 + jax.random.normal(jax.random.key(0), (7, D), jnp.bfloat16)
    weights = {"scale": jax.random.normal(jax.random.key(1), (D,))}
    weights |= {"bias": jax.random.normal(jax.random.key(2), (D,))} if bias else {}
    wide = np.asarray(x, np.float64)
    wide = wide - wide.mean(-1, keepdims=True)
    want = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-3) * weights["scale"] + weights.get("bias", 0)
    got = Norm(D, spec).apply({"params": weights}, x)
    assert (np.asarray(got) == np.asarray(want).astype(ml_dtypes.bfloat16)).mean() > 0.995


def test_an_offset_is_added_in_float32():
    # 1 + 0.01 in bfloat16 would be 1.0078125.
    spec = NormSpec(eps=1e-12, offset=1.0, cast="after_scale")
    x, scale = jnp.ones((1, D), jnp.float32), jnp.full((D,), 0.01, jnp.bfloat16)
    np.testing.assert_allclose(normalised(spec, x, scale), 1 + np.asarray(scale, np.float32)[None], rtol=1e-6)


def test_several_dimensions_are_normalised_together():
    spec = NormSpec(eps=1e-5, cast="after_scale")
    x, scale = jax.random.normal(jax.random.key(0), (3, 4, 12)), jax.random.normal(jax.random.key(1), (D,))
    got = Norm(D, spec, dims=2).apply({"params": {"scale": scale}}, x)
    np.testing.assert_allclose(got.reshape(3, D), normalised(spec, x.reshape(3, D), scale), rtol=1e-5, atol=1e-6)


def test_it_starts_as_a_factor_of_one():
    for offset in (0.0, 1.0):
        module = Norm(D, NormSpec(eps=1e-5, offset=offset))
        variables = unboxed(module.init(jax.random.key(0), jnp.ones((1, D))))
        np.testing.assert_allclose(variables["params"]["scale"] + offset, np.ones(D))


def test_eps_and_cast_are_checked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"positive eps\. Received: eps=0"):
        NormSpec(eps=0)
    with pytest.raises(ValueError, match=r"kind must be 'rms' or 'layer'\. Received: kind='batch'"):
        NormSpec(eps=1e-5, kind="batch")
    with pytest.raises(ValueError, match="cast='never'"):
        NormSpec(eps=1e-5, cast="never")

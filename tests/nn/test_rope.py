"""Rotary positions: rotation is a complex product, each scaling is its formula, and the reference library agrees."""

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotarySpec,
    YarnScaling,
    rotary_tables,
    rotate,
)

H = 16
POSITIONS = np.array([[0, 1, 5, 4095, 8193]])
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=256)
YARN = YarnScaling(factor=4.0, original_max_length=128)


def test_each_pair_of_halves_is_multiplied_by_a_unit_complex_number():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, H))
    spec = RotarySpec(theta=100.0)
    got = rotate(x, rotary_tables(spec, H, jnp.array(POSITIONS)), spec)
    for t, head, i in np.ndindex(5, 2, H // 2):
        angle = POSITIONS[0, t] * 100.0 ** (-2 * i / H)
        want = complex(x[0, t, head, i], x[0, t, head, i + H // 2]) * cmath.exp(1j * angle)
        np.testing.assert_allclose(complex(got[0, t, head, i], got[0, t, head, i + H // 2]), want, atol=2e-3)


def test_products_depend_on_the_distance_alone():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, H))

    def product(position, other):
        spec = RotarySpec(theta=1e4)
        tables = (rotary_tables(spec, H, jnp.array([[p]])) for p in (position, other))
        return jnp.sum(rotate(query, next(tables), spec) * rotate(key, next(tables), spec))

    np.testing.assert_allclose(product(9, 4), product(105, 100), rtol=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-2


def test_a_fraction_leaves_the_rest_of_a_head():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, H))
    half, full = RotarySpec(theta=100.0, fraction=0.5), RotarySpec(theta=100.0)
    got = rotate(x, rotary_tables(half, H, jnp.array(POSITIONS)), half)
    whole = rotate(x[..., : H // 2], rotary_tables(full, H // 2, jnp.array(POSITIONS)), full)
    np.testing.assert_array_equal(got[..., H // 2 :], x[..., H // 2 :])
    np.testing.assert_allclose(got[..., : H // 2], whole, rtol=1e-6)


def frequencies(spec, positions=(1,)):
    """Angles at position 1, and the factor that cos and sin carry."""
    cos, sin = (np.asarray(table)[0, 0] for table in rotary_tables(spec, H, jnp.array([positions])))
    return np.arctan2(sin, cos), np.hypot(sin, cos)


def test_linear_scaling_divides_every_frequency():
    plain, scaled = (frequencies(RotarySpec(theta=1e4, scaling=s))[0] for s in (None, LinearScaling(factor=4.0)))
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-5)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between():
    plain, scaled = (frequencies(RotarySpec(theta=1e4, scaling=s))[0] for s in (None, LLAMA3))
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 256 / 4:
            want = before
        elif wavelength > 256 / 1:
            want = before / 8
        else:
            blend = (256 / wavelength - 1) / (4 - 1)
            want = blend * before + (1 - blend) * before / 8
        np.testing.assert_allclose(after, want, rtol=1e-5)
    assert len({round(after / before, 4) for before, after in zip(plain, scaled, strict=True)}) > 2


def test_yarn_goes_from_the_plain_to_the_interpolated_frequency_and_sharpens():
    plain, _ = frequencies(RotarySpec(theta=1e4))
    scaled, factor = frequencies(RotarySpec(theta=1e4, scaling=YARN))
    ratio = scaled / plain
    np.testing.assert_allclose([ratio[0], ratio[-1]], [1, 1 / 4], rtol=1e-4)
    assert (np.diff(ratio) <= 1e-6).all()
    np.testing.assert_allclose(factor, 0.1 * math.log(4) + 1, rtol=1e-5)


def test_interleaved_pairs_are_neighbours():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, H))
    spec = RotarySpec(theta=100.0, fraction=0.5, interleaved=True)
    got = rotate(x, rotary_tables(spec, H, jnp.array(POSITIONS)), spec)
    half = RotarySpec(theta=100.0, fraction=0.5)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7, *range(8, 16)])  # neighbours apart: the first of each pair, the second
    want = rotate(x[..., order], rotary_tables(half, H, jnp.array(POSITIONS)), half)
    np.testing.assert_allclose(got[..., order], want, rtol=1e-6)


def test_a_rotation_in_float32_rounds_once():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, H), jnp.bfloat16)
    spec = RotarySpec(theta=100.0, in_float32=True)
    tables = rotary_tables(spec, H, jnp.array(POSITIONS))
    got = rotate(x, tables, spec)
    rounded = tuple(table.astype(jnp.bfloat16).astype(jnp.float32) for table in tables)
    want = rotate(x.astype(jnp.float32), rounded, spec).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    whole = RotarySpec(theta=100.0, in_float32=True, round_tables=False)
    want = rotate(x.astype(jnp.float32), tables, whole).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rotate(x, tables, whole), np.float32), np.asarray(want, np.float32))
    assert (np.asarray(got, np.float32) != np.asarray(want, np.float32)).mean() > 0.1
    with pytest.raises(ValueError, match="not rounded need a rotation in float32"):
        RotarySpec(theta=100.0, round_tables=False)
    in_bfloat16 = rotate(x, tables, RotarySpec(theta=100.0))
    assert (np.asarray(got, np.float32) != np.asarray(in_bfloat16, np.float32)).mean() > 0.1


def test_longrope_takes_the_long_factors_of_a_row_beyond_the_original_context():
    short, long = tuple(1.0 + 0.1 * i for i in range(H // 2)), tuple(2.0 + i for i in range(H // 2))
    scaling = LongRopeScaling(short_factor=short, long_factor=long, original_max_length=8, attention_factor=1.5)
    plain, _ = frequencies(RotarySpec(theta=1e4))
    for last, factors in ((7, short), (8, long)):
        angles, factor = frequencies(RotarySpec(theta=1e4, scaling=scaling), (1, last))
        np.testing.assert_allclose(angles, plain / factors, rtol=1e-5)
        np.testing.assert_allclose(factor, 1.5, rtol=1e-6)
    with pytest.raises(ValueError, match=r"longrope needs 4 short and long factors .* Received: 8 and 8"):
        RotarySpec(theta=1e4, scaling=scaling).width(8)


def test_dynamic_scaling_acts_on_a_row_once_it_is_longer_than_the_context():
    spec = RotarySpec(theta=1e4, scaling=DynamicScaling(factor=2.0, original_max_length=8))
    positions = jnp.array([[0, 3, 7], [0, 3, 15]])
    both = rotary_tables(spec, H, positions)[0]
    np.testing.assert_array_equal(both[:1], rotary_tables(RotarySpec(theta=1e4), H, positions[:1])[0])
    theta = 1e4 * (2 * 16 / 8 - 1) ** (H / (H - 2))
    np.testing.assert_allclose(both[1:], rotary_tables(RotarySpec(theta=theta), H, positions[1:])[0], atol=1e-5)


def test_what_cannot_be_rotated_is_refused():
    with pytest.raises(ValueError, match=r"theta must exceed 1\. Received: theta=0"):
        RotarySpec(theta=0)
    with pytest.raises(ValueError, match=r"scaling must be one of .* Received: scaling={'type': 'su'}"):
        RotarySpec(theta=1e4, scaling={"type": "su"})
    with pytest.raises(ValueError, match=r"even width\. Received: head_dim=15"):
        RotarySpec(theta=1e4).width(15)


@pytest.mark.reference
@pytest.mark.parametrize(
    "scaling, parameters",
    [
        (None, {"rope_type": "default"}),
        (LinearScaling(factor=3.0), {"rope_type": "linear", "factor": 3.0}),
        (
            LLAMA3,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        ),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
        (
            YarnScaling(factor=4.0, original_max_length=128, mscale=0.7, mscale_all_dim=0.9, truncate=False),
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
                "truncate": False,
            },
        ),
        (DynamicScaling(factor=2.0, original_max_length=512), {"rope_type": "dynamic", "factor": 2.0}),
    ],
    ids=["plain", "linear", "llama3", "yarn", "yarn_mscale", "dynamic"],
)
def test_the_tables_are_those_of_transformers(scaling, parameters):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * H,
        num_attention_heads=4,
        head_dim=H,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 1e4, **parameters},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor(POSITIONS))
    got = rotary_tables(RotarySpec(theta=1e4, scaling=scaling), H, jnp.array(POSITIONS))
    for table, want in zip(got, (cos, sin), strict=True):
        # An angle of 8193 radians carries the rounding of its frequency 8193 times.
        np.testing.assert_allclose(table, want.numpy()[..., : H // 2], atol=2e-3)
        np.testing.assert_allclose(table[:, :3], want.numpy()[:, :3, : H // 2], atol=2e-6)

"""Ratios add before they divide."""

import jax.numpy as jnp
import pytest

from dew.objectives.base import Ratio, pool


def test_pooled_ratios_divide_once():
    pooled = Ratio(6.0, 2.0) + Ratio(1.0, 8.0)
    assert pooled.value() == pytest.approx(0.7)
    assert pooled.value() != pytest.approx((Ratio(6.0, 2.0).value() + Ratio(1.0, 8.0).value()) / 2)


def test_a_ratio_without_mass_is_zero():
    assert Ratio(0.0, 0.0).value() == 0.0


def test_reading_gives_floats():
    read = Ratio(jnp.asarray(3, jnp.float32), jnp.asarray(4, jnp.float32)).read()
    assert (type(read.total), type(read.mass)) == (float, float)
    assert read.value() == 0.75


def test_pooling_keeps_names_that_only_one_side_has():
    got = pool({"loss": Ratio(1.0, 1.0)}, {"loss": Ratio(2.0, 3.0), "other": Ratio(5.0, 1.0)})
    assert got == {"loss": Ratio(3.0, 4.0), "other": Ratio(5.0, 1.0)}

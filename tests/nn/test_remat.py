"""Policies: what is not honoured is refused, what is honoured keeps what it says."""

import jax
import jax.numpy as jnp
import pytest

from dew.nn.remat import REMAT_POLICIES, checked_remat, checkpointed


@pytest.mark.parametrize("name", sorted(set(REMAT_POLICIES) - {"full"}))
def test_policies_of_the_table_that_are_not_available_say_so(name):
    with pytest.raises(ValueError, match=f"remat policy '{name}' is not available yet; use None or 'full'"):
        checked_remat(name)


@pytest.mark.parametrize("remat", ["everything", 3, {"save": ["q_proj"]}])
def test_unknown_policies_are_refused(remat):
    with pytest.raises(ValueError, match="remat must be None or 'full'"):
        checked_remat(remat)


def products(remat):
    def block(x, weight):
        return jnp.tanh(jnp.tanh(x @ weight) @ weight)

    def loss(weight, x):
        return jnp.sum(checkpointed(block, remat, in_loop=False)(x, weight))

    return str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 4)), jnp.ones((4, 4)))).count("dot_general")


def test_full_computes_the_block_again_and_none_does_not():
    assert products("full") > products(None)

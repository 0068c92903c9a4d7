"""What the exchange over the expert axis sends is what its docstring says, in the compiled program."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from dew.nn.moe import Experts, ExpertsSpec
from dew.nn.router import RouterSpec
from dew.parallel.expert_exchange import share_bytes, share_of
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from tools.collectives import collectives

B, T, D, K, DEVICES = 16, 32, 16, 2, 4


@functools.cache
def exchanges(top_k):
    """List the all-to-alls of a layer's loss and gradient on expert=4 (and data=2)."""
    module = Experts(D, ExpertsSpec(num_experts=8, features=24, router=RouterSpec(top_k=top_k)))
    x = jnp.ones((B, T, D))
    params = nn.unbox(module.init(jax.random.key(0), x))
    mesh = build_mesh(MeshSpec(expert=DEVICES))
    loss = lambda params, x: jnp.sum(module.apply(params, x)[0] ** 2)  # noqa: E731
    with jax.set_mesh(mesh), nn.logical_axis_rules(Layout().rules):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile().as_text()
    return [each for each in collectives(text, dict(mesh.shape)) if each.kind == "all-to-all"]


def test_a_share_holds_an_even_routing_and_never_more_than_all_tokens():
    assert share_of(64, 2, 4) == 32
    assert share_of(100, 2, 8) == 32
    assert share_of(64, 4, 4) == share_of(64, 8, 4) == 64


def test_the_first_share_costs_the_bytes_of_the_formula_there_back_and_backward():
    slots = DEVICES * share_of(B * T // 8, K, DEVICES)
    first = [each for each in exchanges(K) if not each.trips]
    assert {each.axes for each in first} == {("expert",)}
    forward = sum(each.bytes for each in first if each.phase == "forward")
    backward = sum(each.bytes for each in first if each.phase == "backward")
    assert forward == slots * (D * 4 + 8 * K) + slots * D * 4
    assert backward == slots * (2 * D * 4 + 4 * K)
    assert (forward, backward) == share_bytes(B * T // 8, K, DEVICES, D, 4)


def test_further_shares_run_in_loops_of_unknown_length():
    loops = [each for each in exchanges(K) if each.trips]
    slots = DEVICES * share_of(B * T // 8, K, DEVICES)
    assert all(each.trips == (None,) for each in loops)
    there, back, cotangents = D * 4 + 8 * K, D * 4, 2 * D * 4 + 4 * K
    assert sum(each.bytes for each in loops) == slots * (there + back + there + cotangents)


@pytest.mark.parametrize("top_k", [4, 8])
def test_where_a_share_holds_every_token_there_is_no_loop(top_k):
    assert all(not each.trips for each in exchanges(top_k))


@pytest.mark.parametrize("packed", [True, False])
def test_balance_statistics_of_documents_are_summed_over_the_sequence_axis(packed):
    experts = 8
    module = Experts(D, ExpertsSpec(num_experts=experts, features=24, router=RouterSpec(top_k=K)))
    x = jnp.ones((B, T, D))
    params = nn.unbox(module.init(jax.random.key(0), x))
    counted, documents = jnp.ones((B, T)), jnp.zeros((B, T), jnp.int32) if packed else None
    mesh = build_mesh(MeshSpec(sequence=2))
    run = lambda params, x: module.apply(params, x, None, counted, documents)[1].balance  # noqa: E731
    with jax.set_mesh(mesh), nn.logical_axis_rules(Layout().rules):
        text = jax.jit(run).lower(params, x).compile().as_text()
    summed = [each for each in collectives(text, dict(mesh.shape)) if each.axes == ("sequence",)]
    assert {each.kind for each in summed} == {"all-reduce"}
    # Slot counts and shares of each expert, for as many documents as a row could have.
    assert sum(each.bytes for each in summed) == B // 4 * (T if packed else 1) * 2 * experts * 4

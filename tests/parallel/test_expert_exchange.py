"""What the exchange over the expert axis sends is what its docstring says, in the compiled program."""

import collections
import functools
import math

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

B, T, D, F, K, E = 16, 32, 16, 24, 2, 8
ALONE = MeshSpec(expert=4)
BESIDE_TENSOR = MeshSpec(expert=2, tensor=2)


@functools.cache
def sent(top_k, spec):
    """List what a layer's loss and gradient send on a mesh, and the sizes of its axes."""
    module = Experts(D, ExpertsSpec(num_experts=E, features=F, router=RouterSpec(top_k=top_k)))
    x = jnp.ones((B, T, D))
    params = nn.unbox(module.init(jax.random.key(0), x))
    mesh = build_mesh(spec)
    loss = lambda params, x: jnp.sum(module.apply(params, x)[0] ** 2)  # noqa: E731
    with jax.set_mesh(mesh), nn.logical_axis_rules(Layout().rules):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile().as_text()
    found = [each for each in collectives(text, dict(mesh.shape)) if each.axes]  # without axes nobody sends
    return found, dict(mesh.shape)


def exchanges(top_k, spec=ALONE):
    return [each for each in sent(top_k, spec)[0] if each.kind == "all-to-all"]


def tokens_of(spec):
    """Count the tokens of a device."""
    sizes = build_mesh(spec).shape
    return B * T // math.prod(sizes[axis] for axis in ("data", "expert", "fsdp", "sequence"))


def test_a_share_holds_an_even_routing_and_never_more_than_all_tokens():
    assert share_of(64, 2, 4) == 32
    assert share_of(100, 2, 8) == 32
    assert share_of(64, 4, 4) == share_of(64, 8, 4) == 64


@pytest.mark.parametrize("spec", [ALONE, BESIDE_TENSOR], ids=str)
def test_the_first_share_costs_the_bytes_of_the_formula_there_back_and_backward(spec):
    slots = spec.expert * share_of(tokens_of(spec), K, spec.expert)
    first = [each for each in exchanges(K, spec) if not each.trips]
    assert {each.axes for each in first} == {("expert",)}
    forward = sum(each.bytes for each in first if each.phase == "forward")
    backward = sum(each.bytes for each in first if each.phase == "backward")
    assert forward == slots * (D * 4 + 8 * K) + slots * D * 4
    assert backward == slots * (2 * D * 4 + 4 * K)
    assert (forward, backward) == share_bytes(tokens_of(spec), K, spec.expert, D, 4)[:2]


@pytest.mark.parametrize(
    "spec, rounds, partial_sums",
    [(ALONE, {("data", "expert"): 1}, 0), (BESIDE_TENSOR, {}, 3)],
    ids=str,
)
def test_beside_it_only_gradients_and_what_tensor_splits_are_summed(spec, rounds, partial_sums):
    found, sizes = sent(K, spec)
    others = [each for each in found if each.kind != "all-to-all"]
    assert {each.kind for each in others} == {"all-reduce"}
    got = collections.Counter((each.axes, math.prod(shape)) for each in others for shape in each.shapes)
    over = lambda *axes: tuple(axis for axis in axes if sizes[axis] > 1)  # noqa: E731
    want = collections.Counter({(axes, 1): count for axes, count in rounds.items()})
    want[over("data"), E // spec.expert * D * F // spec.tensor] += 3  # the gradients of the three banks
    want[over("data", "expert", "tensor"), D * E] += 1  # the gradient of the router
    # Where tensor splits the hidden width: what the experts say, and the gradients of the tokens there and at home.
    want[over("tensor"), tokens_of(spec) * D] += partial_sums
    assert got == +want


def test_further_shares_run_in_loops_of_unknown_length():
    loops = [each for each in exchanges(K) if each.trips]
    slots = ALONE.expert * share_of(tokens_of(ALONE), K, ALONE.expert)
    assert all(each.trips == (None,) for each in loops)
    there, back, cotangents = D * 4 + 8 * K, D * 4, 2 * D * 4 + 4 * K
    sent = sum(each.bytes for each in loops)
    assert sent == slots * (there + back + there + cotangents)
    forward, _, further = share_bytes(tokens_of(ALONE), K, ALONE.expert, D, 4)
    assert sent == forward + further


@pytest.mark.parametrize("top_k", [4, 8])
def test_where_a_share_holds_every_token_there_is_no_loop(top_k):
    assert all(not each.trips for each in exchanges(top_k))


@pytest.mark.parametrize("packed", [True, False])
def test_balance_statistics_of_documents_are_summed_over_the_sequence_axis(packed):
    module = Experts(D, ExpertsSpec(num_experts=E, features=F, router=RouterSpec(top_k=K)))
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
    assert sum(each.bytes for each in summed) == B // 4 * (T if packed else 1) * 2 * E * 4

"""A layer of experts equals a loop over tokens and slots, on one device and on every mesh, every gradient leaf."""

import dataclasses
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dew.nn.mlp import MlpSpec
from dew.nn.moe import Experts, ExpertsSpec
from dew.nn.router import RouterSpec, choose
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.tree import named_leaves
from tests.nn.slow_experts import slow_choice, slow_experts

B, T, D, F, E = 8, 16, 16, 24, 8
PLAIN = ExpertsSpec(num_experts=E, features=F, router=RouterSpec(top_k=2))
FULL = ExpertsSpec(
    num_experts=E,
    features=F,
    router=RouterSpec(
        top_k=3, score="sigmoid", normalise=True, scale=1.5, groups=4, top_groups=2, bias=True, balance_bias=True
    ),
    limit=1.5,
    alpha=1.3,
    bias=True,
    shared=MlpSpec(features=32),
    shared_gate=True,
)


def silu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def clamped(gate, up):
    gate, up = np.minimum(gate, FULL.limit), np.clip(up, -FULL.limit, FULL.limit)
    return gate / (1 + np.exp(-FULL.alpha * gate)) * (up + 1)


@functools.cache
def layer(spec, seed=0):
    """Give a layer and weights that are all different from zero, large enough to leave the clamp's middle."""
    module = Experts(D, spec)
    shapes = jax.eval_shape(lambda: nn.unbox(module.init(jax.random.key(0), jnp.zeros((1, 1, D))))["params"])
    names = named_leaves(shapes)
    keys = dict(zip(names, jax.random.split(jax.random.key(seed), len(names)), strict=True))
    leaves = {path: 0.4 * jax.random.normal(keys[path], leaf.shape) for path, leaf in names.items()}
    return module, flax.traverse_util.unflatten_dict(leaves, sep="/")


def tokens(rows=B):
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (rows, T, D))
    counted = jax.random.uniform(keys[1], (rows, T)) * (jnp.arange(T) > 1)
    return {
        "x": x,
        "is_token": jnp.arange(T)[None] < T - jnp.arange(rows)[:, None],
        "counted": counted,
        "documents": jnp.cumsum(jax.random.bernoulli(keys[2], 0.2, (rows, T)), axis=1).at[:, 0].set(0) % T,
    }


@pytest.mark.parametrize("spec, activation", [(PLAIN, silu), (FULL, clamped)])
def test_it_is_a_loop_over_tokens_and_slots(spec, activation):
    module, params = layer(spec)
    x = tokens()["x"]
    flat = np.asarray(x, np.float64).reshape(-1, D)
    router = {name: np.asarray(value, np.float64) for name, value in params["router"].items()}
    logits = flat @ router["kernel"] + router.get("bias", 0)
    choice = slow_choice(logits, spec.router, router.get("balance_bias"))
    want = slow_experts(flat, params["experts"], *choice, activation)
    if spec.shared is not None:
        shared = {name: np.asarray(params["shared"][name]["kernel"], np.float64) for name in params["shared"]}
        hidden = silu(flat @ shared["gate_proj"], flat @ shared["up_proj"]) @ shared["down_proj"]
        want += hidden / (1 + np.exp(-flat @ np.asarray(params["shared_gate"]["kernel"], np.float64)))
    got, routing = jax.jit(module.apply)({"params": params}, x)
    assert routing is None
    np.testing.assert_allclose(got.reshape(-1, D), want, rtol=0, atol=2e-5 * np.abs(want).max())


def every_expert(params, x, spec):
    """Compute every token by every expert; those that it did not choose weigh nothing."""
    flat, router, banks = x.reshape(-1, D), params["router"], params["experts"]
    choice = choose(flat @ router["kernel"] + router["bias"], router["balance_bias"], spec.router)
    weights = jnp.sum(jax.nn.one_hot(choice.experts, E) * choice.weights[..., None], axis=1)
    gate, up = (
        jnp.einsum("ND,EDF->NEF", flat, banks[name]) + banks[f"{name}_bias"] for name in ("gate_proj", "up_proj")
    )
    gate, up = jnp.minimum(gate, spec.limit), jnp.clip(up, -spec.limit, spec.limit)
    hidden = gate * jax.nn.sigmoid(spec.alpha * gate) * (up + 1)
    out = jnp.einsum("NEF,EFD->NED", hidden, banks["down_proj"]) + banks["down_proj_bias"]
    return jnp.einsum("NED,NE->ND", out, weights).reshape(x.shape)


def test_gradients_are_those_of_every_expert_computing_every_token():
    spec = dataclasses.replace(FULL, shared=None, shared_gate=False)
    module, params = layer(spec)
    x = tokens()["x"]

    def gradients(apply):
        return named_leaves(jax.jit(jax.grad(lambda params, x: jnp.sum(jnp.sin(apply(params, x))), (0, 1)))(params, x))

    got = gradients(lambda params, x: module.apply({"params": params}, x)[0])
    for path, want in gradients(lambda params, x: every_expert(params, x, spec)).items():
        scale = np.abs(want).max()
        assert scale > 0 or path.endswith("balance_bias"), f"{path} is zero: the test could not fail"
        np.testing.assert_allclose(got[path], want, rtol=0, atol=2e-5 * scale, err_msg=path)


def test_padding_reads_no_expert_and_takes_no_capacity():
    module, params = layer(PLAIN)
    batch = tokens()
    whole, _ = module.apply({"params": params}, batch["x"])
    got, _ = module.apply({"params": params}, batch["x"], batch["is_token"])
    np.testing.assert_allclose(got, jnp.where(batch["is_token"][..., None], whole, 0), rtol=1e-5, atol=1e-5)


def dropped_by_loop(experts, is_token, factor):
    """Mark the slots that find their expert full, token by token."""
    dropped = np.zeros(experts.shape, bool)
    for row in range(len(experts)):
        taken = np.zeros(E, int)
        capacity = max(1, int(np.ceil(is_token[row].sum() * experts.shape[-1] / E) * factor))
        for place in range(T):
            for slot, expert in enumerate(experts[row, place]):
                dropped[row, place, slot] = taken[expert] >= capacity
                taken[expert] += is_token[row, place]
    return dropped


CAPPED = ExpertsSpec(num_experts=E, features=F, router=RouterSpec(top_k=2), bias=True, capacity_factor=0.75)


def test_a_capacity_drops_later_tokens_of_a_row_and_counts_them():
    module, params = layer(CAPPED)
    batch = tokens()
    flat = np.asarray(batch["x"], np.float64).reshape(-1, D)
    experts, weights = slow_choice(flat @ np.asarray(params["router"]["kernel"], np.float64), CAPPED.router)
    dropped = dropped_by_loop(experts.reshape(B, T, 2), np.asarray(batch["is_token"]), factor=0.75)
    reads = ~dropped & np.asarray(batch["is_token"])[..., None]
    want = slow_experts(flat, params["experts"], experts, weights * reads.reshape(-1, 2), silu)
    got, routing = jax.jit(module.apply)({"params": params}, *batch.values())
    np.testing.assert_allclose(got.reshape(-1, D), want, rtol=0, atol=2e-5 * np.abs(want).max())
    assert dropped.any()
    np.testing.assert_allclose(routing.dropped, np.sum(dropped * np.asarray(batch["counted"])[..., None]), rtol=1e-5)


def test_a_row_drops_what_it_drops_without_its_padding():
    module, params = layer(CAPPED)
    x, real = tokens()["x"], 9
    alone, _ = module.apply({"params": params}, x[:, :real])
    padded, _ = module.apply({"params": params}, x, jnp.broadcast_to(jnp.arange(T) < real, x.shape[:2]))
    np.testing.assert_allclose(padded[:, :real], alone, rtol=1e-5, atol=1e-5)
    whole, _ = module.apply({"params": params}, x)
    assert np.abs(whole[:, :real] - alone).max() > 1e-2, "a longer row keeps more"


def test_behind_a_cache_nothing_is_dropped():
    module, params = layer(CAPPED)
    batch = tokens()
    unlimited, _ = layer(dataclasses.replace(CAPPED, capacity_factor=None))
    want, _ = unlimited.apply({"params": params}, batch["x"], batch["is_token"])
    got, _ = module.apply({"params": params}, batch["x"], batch["is_token"], is_cached=True)
    np.testing.assert_array_equal(got, want)
    assert np.any(module.apply({"params": params}, batch["x"], batch["is_token"])[0] != want)


def test_the_balance_loss_is_one_a_token_where_all_is_even_and_adds_up_over_documents():
    module, params = layer(PLAIN)
    batch = tokens()
    _, routing = module.apply({"params": params}, *batch.values())
    flat = np.asarray(batch["x"], np.float64).reshape(-1, D)
    logits = flat @ np.asarray(params["router"]["kernel"], np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    experts, _ = slow_choice(logits, PLAIN.router)
    total = 0.0
    for row in range(B):
        for document in set(np.asarray(batch["documents"][row]).tolist()):
            inside = np.flatnonzero(np.asarray(batch["documents"][row]) == document)
            weight = np.asarray(batch["counted"], np.float64)[row, inside]
            if weight.sum() == 0:
                continue
            slots = np.eye(E)[experts[row * T + inside]].sum(1)
            f = weight @ slots / (2 * weight.sum())
            p = weight @ shares[row * T + inside] / weight.sum()
            total += weight.sum() * E * np.sum(f * p)
    np.testing.assert_allclose(routing.balance, total, rtol=1e-5)
    even = jax.tree.map(jnp.zeros_like, params["router"])
    _, routing = module.apply({"params": {**params, "router": even}}, *batch.values())
    np.testing.assert_allclose(routing.balance, routing.tokens, rtol=1e-5)
    np.testing.assert_allclose(routing.entropy, routing.tokens, rtol=1e-5)


MESHES = {
    "data=8": MeshSpec(),
    "expert=2": MeshSpec(expert=2),
    "expert=4": MeshSpec(expert=4),
    "expert=2 fsdp=2 tensor=2": MeshSpec(expert=2, fsdp=2, tensor=2),
    "expert=2 tensor=2 sequence=2": MeshSpec(expert=2, tensor=2, sequence=2),
    "expert=4 sequence=2": MeshSpec(expert=4, sequence=2),
}
SKEWED = "expert=4, all to one device"


@functools.cache
def scored(spec, mesh_name, skewed=False, rows=B):
    """Give output, statistics and every gradient, on the host."""
    module, params = layer(spec)
    if skewed:
        params = {**params, "router": {**params["router"], "kernel": params["router"]["kernel"].at[:, :2].set(9.0)}}
    batch = tokens(rows)
    if skewed:
        batch["x"] = jnp.abs(batch["x"])
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if mesh_name is None else build_mesh(MESHES[mesh_name])

    def loss(params, x):
        out, routing = module.apply({"params": params}, x, *list(batch.values())[1:])
        scalars = (routing.balance, routing.z, routing.entropy, routing.bias_term)
        return jnp.sum(jnp.sin(out)) + sum((i + 1) * 0.1 * s for i, s in enumerate(scalars)), (out, routing)

    with jax.set_mesh(mesh), nn.logical_axis_rules(Layout().rules):
        (_, aux), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, batch["x"])
    return jax.device_get(aux), named_leaves(jax.device_get(gradients))


def assert_equal(got, want):
    for path, value in named_leaves(want[0]).items():
        np.testing.assert_allclose(
            named_leaves(got[0])[path], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=path
        )
    assert want[1].keys() == got[1].keys()
    for path, value in want[1].items():
        scale = np.abs(value).max()
        assert scale > 0, f"{path} is zero: the test could not fail"
        np.testing.assert_allclose(got[1][path], value, rtol=0, atol=2e-5 * scale, err_msg=path)


@pytest.mark.parametrize("name", MESHES)
def test_output_statistics_and_every_gradient_equal_those_of_one_device(name):
    assert_equal(scored(FULL, name), scored(FULL, None))


# 80 tokens on a device in shares of 24: four, the last not full. 16 in shares of 16: one.
@pytest.mark.parametrize("name, top_k, rows", [("expert=4", 1, 40), ("expert=2 tensor=2 sequence=2", 2, B)])
def test_tokens_that_all_go_to_one_device_are_all_computed(name, top_k, rows):
    spec = dataclasses.replace(PLAIN, router=RouterSpec(top_k=top_k))
    got, want = scored(spec, name, skewed=True, rows=rows), scored(spec, None, skewed=True, rows=rows)
    assert want[0][1].load[:2].sum() > 0.9 * want[0][1].load.sum()
    assert_equal(got, want)


def test_rows_too_few_to_split_are_computed_where_their_experts_are():
    assert_equal(scored(FULL, "expert=4", rows=1), scored(FULL, None, rows=1))


def test_a_capacity_counts_a_row_whole_where_its_positions_are_split():
    got, want = scored(CAPPED, "expert=4 sequence=2"), scored(CAPPED, None)
    assert want[0][1].dropped > 0
    assert_equal(got, want)


def test_an_expert_axis_that_does_not_divide_the_experts_is_refused():
    module = Experts(D, ExpertsSpec(num_experts=6, features=F, router=RouterSpec(top_k=2)))
    with (
        jax.set_mesh(build_mesh(MeshSpec(expert=4))),
        pytest.raises(LayoutRefused, match=r"expert=4 does not divide the 6 experts.*one of \[1, 2, 3, 6\]"),
    ):
        jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((4, 4, D)))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_experts": 0}, r"positive number and hidden width\. Received: num_experts=0"),
        ({"activation": "tanh"}, r"activation must be one of .*Received: activation='tanh'"),
        ({"limit": -1.0}, r"limit must be positive and replaces the activation.*limit=-1\.0"),
        ({"limit": 7.0, "activation": "gelu"}, r"limit must be positive and replaces the activation.*'gelu'"),
        ({"alpha": 2.0}, r"belongs to the clamped form.*Received: alpha=2\.0, limit=None"),
        ({"alpha": 0.0, "limit": 7.0}, r"alpha must be positive.*Received: alpha=0\.0"),
        ({"shared_gate": True}, r"shared_gate=True needs a shared perceptron\. Use shared=.*Received: .*shared=None"),
        ({"capacity_factor": 0.0}, r"capacity_factor must be positive and finite, or None.*capacity_factor=0\.0"),
        ({"capacity_factor": float("inf")}, r"capacity_factor must be positive and finite.*capacity_factor=inf"),
        ({"capacity_factor": float("nan")}, r"capacity_factor must be positive and finite.*capacity_factor=nan"),
    ],
)
def test_a_spec_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ExpertsSpec(**({"num_experts": 4, "features": 8, "router": RouterSpec(top_k=1)} | fields))

"""Routers choose what a loop over tokens chooses, and what they say of their choices is a plain sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.router import RouterSpec, RouterTraining, Routing, choose, excess_load, router_loss, routing_sums
from tests.nn.slow_experts import slow_choice

N, E = 40, 12
ROUTERS = {
    "softmax": RouterSpec(top_k=2),
    "normalised and scaled": RouterSpec(top_k=3, normalise=True, scale=2.5),
    "softmax of the chosen": RouterSpec(top_k=4, score="softmax_of_chosen"),
    "sigmoid": RouterSpec(top_k=2, score="sigmoid", normalise=True),
    "best of groups": RouterSpec(top_k=3, groups=4, top_groups=2),
    "two best of groups": RouterSpec(top_k=3, score="sigmoid", groups=3, top_groups=1, group_score="top2"),
    "bias": RouterSpec(top_k=2, score="sigmoid", normalise=True, balance_bias=True),
    "bias and groups": RouterSpec(
        top_k=2, score="sigmoid", groups=4, top_groups=2, group_score="top2", balance_bias=True, scale=1.5
    ),
}


def logits_and_bias():
    keys = jax.random.split(jax.random.key(3), 2)
    # Biases below every score, so that closed groups are behind open ones for another reason than their sign.
    return 2 * jax.random.normal(keys[0], (N, E)), jax.random.normal(keys[1], (E,)) - 4


@pytest.mark.parametrize("name", ROUTERS)
def test_it_chooses_what_a_loop_over_tokens_chooses(name):
    spec = ROUTERS[name]
    logits, bias = logits_and_bias()
    bias = bias if spec.balance_bias else None
    choice = choose(logits, bias, spec)
    experts, weights = slow_choice(logits, spec, bias)
    np.testing.assert_array_equal(choice.experts, experts)
    np.testing.assert_allclose(choice.weights, weights, rtol=2e-6)
    np.testing.assert_allclose(jnp.sum(choice.shares, axis=-1), 1, rtol=1e-6)


def test_the_bias_chooses_and_has_no_part_in_the_weights():
    logits, _ = logits_and_bias()
    spec = ROUTERS["bias"]
    bias = jnp.zeros(E).at[7].set(10.0)
    choice = choose(logits, bias, spec)
    assert np.all(np.asarray(choice.experts)[:, 0] == 7)
    own = jax.nn.sigmoid(jnp.take_along_axis(logits, choice.experts, axis=-1))
    np.testing.assert_allclose(choice.weights, own / own.sum(-1, keepdims=True), rtol=1e-6)
    assert not np.any(jax.grad(lambda bias: jnp.sum(choose(logits, bias, spec).weights ** 2))(bias))


def test_experts_far_below_the_best_keep_their_order():
    # exp(-200) has no float32: as shares all but the best are alike.
    logits = jnp.array([[200.0, -2.0, 3.0, 1.0]])
    choice = choose(logits, None, RouterSpec(top_k=3, score="softmax_of_chosen"))
    np.testing.assert_array_equal(choice.experts, [[0, 2, 3]])


def test_the_loss_of_routers_is_the_mean_over_layers_of_each_loss_by_its_weight():
    none = dict.fromkeys(("load", "entropy", "dropped", "tokens"), 0.0)
    layers = [Routing(balance=b, z=z, bias_term=term, **none) for b, z, term in ((3.0, 10.0, 0.25), (5.0, 40.0, 0.5))]
    training = RouterTraining(balance_loss=0.5, z_loss=0.1)
    np.testing.assert_allclose(router_loss(layers, training), 0.5 * 4 + 0.1 * 25, rtol=1e-6)
    # The balance biases of all layers have their own gradient each: nothing is averaged.
    moved = dataclasses.replace(training, bias_rate=0.01)
    np.testing.assert_allclose(router_loss(layers, moved), 0.5 * 4 + 0.1 * 25 + 0.75, rtol=1e-6)


def test_the_gradient_of_a_bias_is_a_count_whatever_its_zero_is_multiplied_by():
    load, factors = jnp.array([[3.0, 0.0, 1.0], [2.0, 2.0, 1.0], [2.0, 2.0, 2.0]]), jnp.array([1 / 7, 0.0, 0.1])

    def total(biases):
        return jnp.sum(jax.vmap(excess_load)(biases, load) * factors)

    assert total(jnp.ones((3, 3))) == 0
    np.testing.assert_array_equal(jax.grad(total)(jnp.ones((3, 3))), [[5, -4, -1], [0, 0, 0], [0, 0, 0]])


def test_sums_count_each_token_with_its_weight_and_each_document_apart():
    spec = RouterSpec(top_k=2)
    logits, _ = logits_and_bias()
    choice = choose(logits, None, spec)
    weights = jax.random.uniform(jax.random.key(5), (4, 10)) * (jnp.arange(10) < 8)
    documents = jnp.array([[0] * 4 + [1] * 6, [0] * 10, list(range(10)), [0] * 5 + [1] * 2 + [2] * 3])
    kept = jnp.ones((N, 2), bool).at[3, 1].set(False)
    by_document, sums = routing_sums(choice, kept, weights, documents, 10)
    want = np.zeros((4, 10, 2, E))
    load, flat = np.zeros(E), np.asarray(weights).reshape(-1)
    for token in range(N):
        row, place = divmod(token, 10)
        for expert in np.asarray(choice.experts[token]):
            want[row, documents[row, place], 0, expert] += flat[token]
            load[expert] += flat[token]
        want[row, documents[row, place], 1] += flat[token] * np.asarray(choice.shares[token])
    np.testing.assert_allclose(by_document, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums["load"], load, rtol=1e-5)
    np.testing.assert_allclose(sums["dropped"], flat[3], rtol=1e-6)
    np.testing.assert_allclose(sums["tokens"], flat.sum(), rtol=1e-6)
    logs = np.log(np.sum(np.exp(np.asarray(logits, np.float64)), axis=-1))
    np.testing.assert_allclose(sums["z"], np.sum(logs**2 * flat), rtol=1e-5)
    shares = np.asarray(choice.shares, np.float64)
    np.testing.assert_allclose(
        sums["entropy"], np.sum(-np.sum(shares * np.log(shares), -1) * flat) / np.log(E), rtol=1e-5
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"top_k": 0}, r"at least one expert\. Received: top_k=0"),
        ({"top_k": 1, "score": "tanh"}, r"score must be one of softmax, softmax_of_chosen, sigmoid\. .*'tanh'"),
        ({"top_k": 1, "group_score": "mean"}, r"group_score must be one of max, top2\. .*'mean'"),
        (
            {"top_k": 1, "score": "softmax_of_chosen", "normalise": True},
            r"leave normalise=False\. .*normalise=True",
        ),
        ({"top_k": 1, "groups": 2, "top_groups": 3}, r"in 1\.\.groups; 2 opens all.*top_groups=3, groups=2"),
        ({"top_k": 1, "groups": 0, "top_groups": 0}, r"groups must be 1, for none, or more\. Received: groups=0"),
        ({"top_k": 1, "scale": 0.0}, r"scale must be a finite number above 0; .*Received: scale=0\.0"),
        ({"top_k": 1, "scale": -2.5}, r"scale must be a finite number above 0; .*Received: scale=-2\.5"),
        ({"top_k": 1, "scale": float("nan")}, r"scale must be a finite number above 0; .*Received: scale=nan"),
        ({"top_k": 1, "scale": float("inf")}, r"scale must be a finite number above 0; .*Received: scale=inf"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RouterSpec(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"top_k": 2, "groups": 5, "top_groups": 5},
            r"do not divide 12 experts\. Use groups=1 or 2 or 3 or 4 or 6 or 12\.",
        ),
        (
            {"top_k": 4, "groups": 4, "top_groups": 1},
            r"top_k=4 exceeds the 3 experts of 1 of 4 groups of 3\. Use top_k=3 or less, or top_groups=2 or more\.",
        ),
        ({"top_k": 13}, r"top_k=13 exceeds the 12 experts of 1 of 1 groups of 12\. Use top_k=12 or less\. Received"),
        (
            {"top_k": 2, "groups": 12, "top_groups": 4, "group_score": "top2"},
            r"group_score='top2' .*; 12 groups have 1\. Use groups=1 or 2 or 3 or 4 or 6, or group_score='max'",
        ),
    ],
)
def test_experts_that_a_router_cannot_choose_from_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RouterSpec(**fields).check(E)

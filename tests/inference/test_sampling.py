"""The draw follows its definition: compared with a slow loop over sorted probabilities in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.inference.generation_config import NOT_APPLIED, sampling_from_config
from dew.inference.sampling import (
    Greedy,
    Sampling,
    Temperature,
    TopK,
    TopP,
    as_sampling,
    draw_tokens,
    penalised,
    restrict_logits,
    tokens_seen,
    with_token,
)


def allowed_tokens(logits, sampling):
    """The tokens that may be drawn, by sorting; ties with the last kept token stay."""
    scaled = logits.astype(np.float64) / sampling.temperature
    keep = np.ones(len(scaled), bool)
    if sampling.top_k is not None:
        cut = np.sort(scaled)[::-1][min(sampling.top_k, len(scaled)) - 1]
        keep &= scaled >= cut
    if sampling.top_p < 1:
        weights = np.where(keep, np.exp(scaled - scaled.max()), 0)
        probabilities = weights / weights.sum()
        mass, cut = 0.0, 0.0
        for probability in np.sort(probabilities)[::-1]:
            mass, cut = mass + probability, probability
            if mass >= sampling.top_p:
                break
        keep &= probabilities >= cut
    if sampling.min_p > 0:
        probabilities = np.exp(scaled - scaled.max())
        keep &= probabilities >= sampling.min_p * probabilities.max()
    return keep


def restricted(logits, sampling):
    return np.asarray(restrict_logits(jnp.asarray(logits), sampling.kind, jnp.asarray(sampling.numbers)))


SAMPLERS = [
    TopK(k=1),
    TopK(k=5, temperature=0.7),
    TopK(k=500),
    TopP(p=0.05),
    TopP(p=0.9),
    TopP(p=0.75, temperature=2.0, k=7),
    Temperature(0.5),
    Sampling(min_p=0.1),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.25),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_the_kept_tokens_are_those_of_a_sort(sampler):
    sampling = as_sampling(sampler)
    logits = np.random.default_rng(0).normal(size=(6, 97)).astype(np.float32) * np.float32(3)
    got = np.isfinite(restricted(logits, sampling))
    want = np.stack([allowed_tokens(row, sampling) for row in logits])
    np.testing.assert_array_equal(got, want)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.integers(-6, 6), min_size=2, max_size=12),
    top_k=st.one_of(st.none(), st.integers(1, 14)),
    top_p=st.sampled_from([0.11, 0.37, 0.83, 1.0]),
)
def test_ties_and_small_vocabularies_follow_the_sort(values, top_k, top_p):
    # Integer logits make ties common; the odd values of top_p keep sums away from rounding.
    sampling = Sampling(top_k=top_k, top_p=top_p)
    logits = np.zeros((1, 16), np.float32) - 50
    logits[0, : len(values)] = values
    np.testing.assert_array_equal(np.isfinite(restricted(logits, sampling))[0], allowed_tokens(logits[0], sampling))


def test_kept_logits_are_the_logits_over_the_temperature():
    logits = np.random.default_rng(1).normal(size=(2, 40)).astype(np.float32)
    got = restricted(logits, Sampling(temperature=0.25, top_k=9))
    kept = np.isfinite(got)
    assert kept.sum() == 18
    np.testing.assert_allclose(got[kept], (logits / 0.25)[kept], rtol=1e-6)


def test_greedy_takes_the_first_of_the_largest():
    logits = jnp.asarray([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 5.0, 5.0]])
    sampling = as_sampling(Greedy())
    tokens = draw_tokens(
        logits, sampling.kind, jnp.asarray(sampling.numbers), jax.random.key(0), jnp.arange(2), jnp.arange(2)
    )
    assert tokens.tolist() == [1, 0]


def draws(logits, sampling, key, rows, positions):
    stacked = jnp.broadcast_to(jnp.asarray(logits), (len(rows), len(logits)))
    return np.asarray(
        draw_tokens(
            stacked, sampling.kind, jnp.asarray(sampling.numbers), key, jnp.asarray(rows), jnp.asarray(positions)
        )
    )


@pytest.mark.parametrize("sampler", [Temperature(0.8), TopK(k=3), TopP(p=0.8, temperature=1.5)], ids=repr)
def test_frequencies_are_the_probabilities(sampler):
    sampling = as_sampling(sampler)
    logits = np.asarray([1.0, 0.2, -0.4, 2.0, 0.0, -3.0], np.float32)
    count = 20_000
    got = (
        np.bincount(
            draws(logits, sampling, jax.random.key(7), np.zeros(count, np.int32), np.arange(count)), minlength=6
        )
        / count
    )
    weights = np.where(allowed_tokens(logits, sampling), np.exp(logits / sampling.temperature), 0)
    # Four standard deviations of the widest frequency at 20,000 draws is 0.014.
    np.testing.assert_allclose(got, weights / weights.sum(), atol=0.014)
    assert not got[weights == 0].any()


def test_a_draw_depends_on_its_row_and_position_alone():
    sampling = Sampling()
    logits = np.zeros(1000, np.float32)
    together = draws(logits, sampling, jax.random.key(3), [0, 1, 2, 1], [9, 9, 9, 10])
    alone = draws(logits, sampling, jax.random.key(3), [1], [9])
    assert together[1] == alone[0]
    assert len(set(together.tolist())) == 4
    assert draws(logits, sampling, jax.random.key(4), [1], [9])[0] != alone[0]


def test_numbers_are_no_part_of_the_program():
    assert Sampling(temperature=0.5, top_k=3).kind == Sampling(temperature=0.9, top_k=40).kind
    assert Sampling(temperature=0.0, top_k=3).kind == as_sampling(Greedy()).kind
    assert Sampling(top_p=1.0).kind != Sampling(top_p=0.9).kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a finite number of 0 or more.*Received: temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_k": 0}, "top_k must be a whole number of 1 or more.*Received: top_k=0"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1.*Received: top_p=0.0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
        ({"min_p": 1.5}, r"min_p must be from 0 \(keeps all\) to 1. Received: min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a positive number.*repetition_penalty=0.0"),
    ],
)
def test_a_distribution_that_does_not_exist_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)


def test_a_name_is_no_strategy():
    with pytest.raises(TypeError, match=r"one of the strategies Greedy\(\).*Received: sampling='greedy'"):
        as_sampling("greedy")


def test_generation_config_is_read_as_transformers_reads_it():
    assert sampling_from_config(None).kind.is_greedy
    assert sampling_from_config({"temperature": 0.6, "eos_token_id": 2}).kind.is_greedy
    assert sampling_from_config({"do_sample": True}) == Sampling(top_k=50)
    assert sampling_from_config({"do_sample": True, "top_k": 0, "top_p": 0.9, "temperature": 0.6}) == Sampling(
        temperature=0.6, top_p=0.9
    )
    assert sampling_from_config({"repetition_penalty": 1.0, "num_beams": 1}) == Sampling(temperature=0.0)
    assert sampling_from_config({"repetition_penalty": 1.1}) == Sampling(temperature=0.0, repetition_penalty=1.1)
    both = {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.05, "top_k": None}
    assert sampling_from_config(both) == Sampling(top_k=50, min_p=0.05, repetition_penalty=1.05)


@pytest.mark.parametrize("name", NOT_APPLIED)
def test_a_field_that_is_not_applied_is_named_and_the_model_generates_all_the_same(name):
    with pytest.warns(UserWarning, match=rf"sets {name}=3, which this version does not apply.*sampling=Greedy"):
        assert sampling_from_config({name: 3, "do_sample": True}) == Sampling(top_k=50)
    for off in (None, *NOT_APPLIED[name]):
        assert sampling_from_config({name: off}) == Sampling(temperature=0.0)


def test_a_penalty_makes_what_a_row_holds_less_likely_whatever_its_sign():
    logits = jnp.asarray([[2.0, -2.0, 1.9, 0.5, -1.0]] * 3)
    marks = tokens_seen(
        jnp.asarray([[0, 1], [4, 0], [2, 2]]), jnp.asarray([[True, True], [False, True], [True, True]]), 5
    )
    assert marks.tolist() == [
        [True, True, False, False, False],
        [True] + [False] * 4,
        [False, False, True] + [False] * 2,
    ]
    sampling = Sampling(temperature=0.0, repetition_penalty=4.0)
    arguments = (sampling.kind, jnp.asarray(sampling.numbers), jax.random.key(0), jnp.arange(3), jnp.arange(3))
    assert draw_tokens(logits, *arguments, marks).tolist() == [2, 2, 0]
    marks = with_token(marks, jnp.asarray([2, 2, 0]))
    assert draw_tokens(logits, *arguments, marks).tolist() == [0, 0, 0]  # 0.5 and 0.5 tie for the first two rows
    np.testing.assert_allclose(
        penalised(logits, marks, 4.0),
        [[0.5, -8.0, 0.475, 0.5, -1], [0.5, -2, 0.475, 0.5, -1], [0.5, -2, 0.475, 0.5, -1]],
    )

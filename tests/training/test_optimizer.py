"""Named optimizers follow their published updates, and their rate can be assigned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.training.optimizer import as_optimizer, assign_learning_rate, make_optimizer, read_learning_rate

PARAMS = {"mlp": {"kernel": jnp.asarray([[1.0, -2.0], [0.5, 4.0]])}, "norm": {"scale": jnp.asarray([1.0, 2.0])}}


def gradients(step):
    return jax.tree.map(lambda p: jnp.sin(p * (step + 1)), PARAMS)


def run(optimizer, steps=5):
    params, state = PARAMS, optimizer.init(PARAMS)
    for step in range(steps):
        updates, state = optimizer.update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def adamw_by_hand(steps, rate, decay=0.0, b1=0.9, b2=0.999, eps=1e-8):
    """Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, algorithm 2, in float64."""
    weight = np.asarray(PARAMS["mlp"]["kernel"], np.float64)
    first = second = np.zeros_like(weight)
    for step in range(steps):
        gradient = np.asarray(gradients(step)["mlp"]["kernel"], np.float64)
        first, second = b1 * first + (1 - b1) * gradient, b2 * second + (1 - b2) * gradient**2
        direction = (first / (1 - b1 ** (step + 1))) / (np.sqrt(second / (1 - b2 ** (step + 1))) + eps)
        weight = weight - rate * (direction + decay * weight)
    return weight


@pytest.mark.parametrize(
    "name, decay, options", [("adam", 0.0, {}), ("AdamW", 0.01, {}), ("adamw", 0.3, {"weight_decay": 0.3, "b1": 0.8})]
)
def test_adam_follows_its_paper(name, decay, options):
    params, _ = run(make_optimizer(name, 0.1, **options))
    want = adamw_by_hand(5, 0.1, decay, b1=options.get("b1", 0.9))
    # optax computes 1 - b2**count in float32, which costs up to 6e-5 of an update of 0.1.
    np.testing.assert_allclose(params["mlp"]["kernel"], want, rtol=0, atol=5 * 0.1 * 6e-5)


def test_sgd_with_momentum():
    params, _ = run(make_optimizer("sgd", 0.1, momentum=0.5), steps=2)
    first, second = gradients(0)["norm"]["scale"], gradients(1)["norm"]["scale"]
    np.testing.assert_allclose(
        params["norm"]["scale"], PARAMS["norm"]["scale"] - 0.1 * (1.5 * first + second), rtol=1e-6
    )


def test_clipping_is_by_the_global_norm():
    params, _ = run(make_optimizer("sgd", 1.0, clip_norm=0.5), steps=1)
    moved = jax.tree.map(lambda a, b: a - b, params, PARAMS)
    assert optax.tree.norm(gradients(0)) > 1
    assert float(optax.tree.norm(moved)) == pytest.approx(0.5, rel=1e-6)


def test_excluded_parameters_do_not_decay():
    kept, _ = run(make_optimizer("adamw", 0.1, weight_decay=0.5, decay_exclude=["*norm/scale"]))
    plain, _ = run(make_optimizer("adamw", 0.1, weight_decay=0.0))
    np.testing.assert_allclose(kept["norm"]["scale"], plain["norm"]["scale"], rtol=1e-6)
    assert np.abs(kept["mlp"]["kernel"] - plain["mlp"]["kernel"]).max() > 0.1


def test_an_exclusion_that_matches_nothing_is_refused():
    optimizer = make_optimizer("adamw", 0.1, decay_exclude=["*norms/scale"])
    with pytest.raises(ValueError, match=r"'\*norms/scale' matches no parameter.*'norm/scale'"):
        optimizer.init(PARAMS)


def test_an_assigned_rate_takes_effect_on_the_next_update():
    optimizer = make_optimizer("sgd", 0.1)
    state = assign_learning_rate(optimizer.init(PARAMS), 2.0)
    assert float(read_learning_rate(state)) == 2.0
    updates, state = optimizer.update(gradients(0), state, PARAMS)
    np.testing.assert_allclose(updates["norm"]["scale"], -2.0 * gradients(0)["norm"]["scale"], rtol=1e-6)
    assert float(read_learning_rate(state)) == 2.0


def test_a_schedule_is_called_with_the_count_of_updates_and_refuses_assignment():
    optimizer = make_optimizer("sgd", lambda count: 0.1 * (count + 1))
    params, state = run(optimizer, steps=2)
    want = PARAMS["norm"]["scale"] - 0.1 * gradients(0)["norm"]["scale"] - 0.2 * gradients(1)["norm"]["scale"]
    np.testing.assert_allclose(params["norm"]["scale"], want, rtol=1e-6)
    assert float(read_learning_rate(state)) == pytest.approx(0.2)
    with pytest.raises(TypeError, match="follows a schedule"):
        assign_learning_rate(state, 1.0)


def test_the_rate_is_float32_for_bfloat16_parameters():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    state = make_optimizer("adamw", 1e-3).init(params)
    assert read_learning_rate(state).dtype == jnp.float32


def test_other_optax_transformations_work_but_keep_no_rate():
    optimizer = as_optimizer(optax.sgd(0.1))
    assert read_learning_rate(optimizer.init(PARAMS)) is None
    with pytest.raises(ValueError, match="keeps no learning rate"):
        assign_learning_rate(optimizer.init(PARAMS), 1.0)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: make_optimizer("adamm"), ValueError, "Did you mean 'adam'.*Received: optimizer='adamm'"),
        (lambda: make_optimizer("zzz"), ValueError, "Known names: adam, adamw, sgd"),
        (lambda: make_optimizer("sgd", -1.0), ValueError, "learning_rate must be >= 0"),
        (lambda: make_optimizer("sgd", float("nan")), ValueError, "learning_rate must be >= 0"),
        (lambda: make_optimizer("sgd", clip_norm=0.0), ValueError, "clip_norm must be > 0"),
        (lambda: make_optimizer("adamw", weight_decay=-1.0), ValueError, "weight_decay must be >= 0"),
        (lambda: make_optimizer("sgd", nesterov=True), ValueError, "needs a momentum"),
        (lambda: make_optimizer("sgd", b1=0.9), TypeError, "b1"),
        (lambda: as_optimizer(3), TypeError, "Received: optimizer=3 of type int"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_construction(make, error, message):
    with pytest.raises(error, match=message):
        make()

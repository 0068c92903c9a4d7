"""Every mapped Keras optimizer makes the updates that the Keras object itself makes."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

from dew.placement.stacks import Bank, StackView
from dew_keras.optimizers import OPTIMIZER_NAMES, OptaxHandle, high_rate, resolve_optimizer

SCHEDULE = keras.optimizers.schedules
CASES = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True, beta_2=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "centered": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01, beta=0.1,
        l2_shrinkage_regularization_strength=0.01,
    ),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.2),
    "schedule": lambda: keras.optimizers.Adam(SCHEDULE.CosineDecay(0.1, 12, warmup_target=0.2, warmup_steps=4)),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=5),
}  # fmt: skip


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(3, 5)).astype("float32"), "b": rng.normal(size=(4,)).astype("float32")}


def gradients(step):
    rng = np.random.default_rng(100 + step)
    return {"a": rng.normal(size=(3, 5)).astype("float32"), "b": rng.normal(size=(4,)).astype("float32")}


def resolve(optimizer):
    return resolve_optimizer(optimizer, is_language_model=False, is_pretrained=False)


def run(transformation, params, steps, gradients=gradients):
    state = transformation.init(params)

    @jax.jit
    def update(params, state, g):
        changes, state = transformation.update(g, state, params)
        return optax.apply_updates(params, changes), state

    for step in range(steps):
        params, state = update(params, state, gradients(step))
    return params, state


@pytest.mark.parametrize("case", CASES)
def test_twenty_updates_equal_those_of_keras(case):
    start = weights()
    reference = CASES[case]()
    variables = [keras.Variable(start[name], name=name) for name in ("a", "b")]
    for step in range(20):
        g = gradients(step)
        reference.apply([jnp.asarray(g["a"]), jnp.asarray(g["b"])], variables)
    got, state = run(resolve(CASES[case]()).build(StackView()), start, 20)
    for variable, name in zip(variables, ("a", "b"), strict=True):
        moved = np.abs(np.asarray(variable) - start[name]).max()
        assert moved > 1e-3, "the case must move the weights to say anything"
        np.testing.assert_allclose(got[name], np.asarray(variable), rtol=2e-5, atol=2e-6)
    assert int(state.count) == 20


@pytest.mark.parametrize("case", ["lamb", "adafactor", "clipnorm", "adamw"])
def test_layers_in_a_bank_are_updated_as_if_stored_apart(case):
    view = StackView((Bank("layers_0_1", ("layers_0", "layers_1")),))
    layers = [weights(seed) for seed in (1, 2)]

    def layer_gradients(step):
        return [gradients(step), jax.tree.map(lambda g: 3 * g, gradients(step + 50))]

    def bank(trees):
        return {"layers_0_1": jax.tree.map(lambda *leaves: np.stack(leaves), *trees)}

    def apart(trees):
        return {f"layers_{i}": tree for i, tree in enumerate(trees)}

    apart_result, _ = run(
        resolve(CASES[case]()).build(StackView()), apart(layers), 5, lambda s: apart(layer_gradients(s))
    )
    bank_result, _ = run(resolve(CASES[case]()).build(view), bank(layers), 5, lambda s: bank(layer_gradients(s)))
    for i in range(2):
        for name in ("a", "b"):
            np.testing.assert_allclose(
                bank_result["layers_0_1"][name][i], apart_result[f"layers_{i}"][name], rtol=1e-5, atol=1e-6
            )


def test_excluded_names_are_not_decayed_in_any_layer():
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["layers_1/b"])
    view = StackView((Bank("layers_0_1", ("layers_0", "layers_1")),))
    start = {"layers_0_1": {"b": np.ones((2, 4), "float32")}}
    zero = {"layers_0_1": {"b": np.zeros((2, 4), "float32")}}
    got, _ = run(resolve(optimizer).build(view), start, 1, lambda step: zero)
    np.testing.assert_allclose(got["layers_0_1"]["b"][0], 0.95, rtol=1e-6)
    np.testing.assert_allclose(got["layers_0_1"]["b"][1], 1.0, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_known_name_resolves_in_any_case(name):
    assert resolve(name.upper()).public.name


def test_an_assigned_rate_is_reported_once():
    compiled = resolve(keras.optimizers.SGD(0.5))
    assert compiled.changed_rates() == {0: 0.5}
    assert compiled.changed_rates() == {}
    compiled.public.learning_rate = 0.25
    assert compiled.changed_rates() == {0: 0.25}
    assert compiled.changed_rates() == {}


def test_an_optax_rate_is_read_and_assigned_through_the_handle():
    transformation = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    compiled = resolve(transformation)
    state = transformation.init({"a": jnp.ones(3)})
    compiled.public.current_state = lambda: state
    assert compiled.public.learning_rate == 0.5
    compiled.public.learning_rate = 0.25
    assert compiled.changed_rates() == {0: 0.25}


def test_an_optax_transformation_without_a_rate_says_how_to_show_one():
    compiled = resolve(optax.sgd(0.1))
    assert isinstance(compiled.public, OptaxHandle)
    with pytest.raises(AttributeError, match="inject_hyperparams"):
        _ = compiled.public.learning_rate


def test_a_wrong_name_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"Did you mean 'adamw'.*Received: optimizer='adanw'"):
        resolve("adanw")


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="Received: optimizer=3"):
        resolve(3)


def test_an_optimizer_without_a_mapping_is_refused():
    with pytest.raises(ValueError, match="Muon is not mapped"):
        resolve(keras.optimizers.Muon(0.01))
    with pytest.raises(ValueError, match="loss_scale_factor"):
        resolve(keras.optimizers.SGD(0.01, loss_scale_factor=2.0))


def test_rates_that_harm_pretrained_weights_are_recognised():
    auto = resolve_optimizer("auto", is_language_model=True, is_pretrained=True)
    assert float(auto.public.learning_rate) == pytest.approx(2e-5)
    assert high_rate(auto) is None
    assert high_rate(resolve(keras.optimizers.Adam(1e-3))) == pytest.approx(1e-3)
    assert high_rate(resolve(keras.optimizers.Adam(SCHEDULE.ExponentialDecay(0.01, 10, 0.5)))) == pytest.approx(0.01)

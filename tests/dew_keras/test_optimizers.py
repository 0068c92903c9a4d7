"""Every Keras optimizer and option makes the updates that the Keras object itself makes."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

from dew.placement.stacks import Bank, StackView
from dew.training.optimizer import as_step_transformation
from dew_keras.optimizers import OPTIMIZER_NAMES, OptaxHandle, high_rate, resolve_optimizer

SCHEDULES = keras.optimizers.schedules
SHAPES = {"dense/bias": (5,), "dense/kernel": (3, 5)}
MUON_SHAPES = {**SHAPES, "embedding/table": (6, 2), "tall/kernel": (4, 2)}
STEPS = 20


class Signed(keras.optimizers.Optimizer):
    """A user's own formula, with a slot per weight and a variable of its own."""

    def __init__(self, learning_rate=0.01, **options):
        super().__init__(learning_rate=learning_rate, **options)
        self.means = []

    def build(self, variables):
        """Make a slot for matrices only, and a counter."""
        if self.built:
            return
        super().build(variables)
        for variable in variables:
            self.means.append(self.add_variable_from_reference(variable, "mean") if variable.ndim == 2 else None)
        self.signs = self.add_variable((), name="signs")

    def update_step(self, gradient, variable, learning_rate):
        """Follow the sign of a mean gradient, more slowly with every step."""
        mean = self.means[self._get_variable_index(variable)]
        if mean is not None:
            self.assign(mean, 0.5 * mean + gradient)
            gradient = mean
        self.assign_add(self.signs, 1.0)
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient) / keras.ops.sqrt(self.signs))


class Halved(keras.optimizers.Adam):
    """A user's subclass that changes its parent's update."""

    def update_step(self, gradient, variable, learning_rate):
        """Halve the steps of biases."""
        super().update_step(gradient, variable, learning_rate * (0.5 if "bias" in variable.path else 1.0))


class Preset(keras.optimizers.Adam):
    """A user's subclass that only chooses arguments."""

    def __init__(self, learning_rate=0.02, **options):
        super().__init__(learning_rate=learning_rate, beta_1=0.8, **options)


CLASSES = {
    "adam": lambda **o: keras.optimizers.Adam(**{"learning_rate": 0.01, **o}),
    "amsgrad": lambda **o: keras.optimizers.Adam(**{"learning_rate": 0.01, "amsgrad": True, "beta_2": 0.9, **o}),
    "adamw": lambda **o: keras.optimizers.AdamW(**{"learning_rate": 0.01, **o}),
    "sgd": lambda **o: keras.optimizers.SGD(**{"learning_rate": 0.1, **o}),
    "momentum": lambda **o: keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **o}),
    "nesterov": lambda **o: keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, **o}),
    "rmsprop": lambda **o: keras.optimizers.RMSprop(**{"learning_rate": 0.01, **o}),
    "centered": lambda **o: keras.optimizers.RMSprop(
        **{"learning_rate": 0.01, "centered": True, "momentum": 0.5, **o}
    ),
    "adagrad": lambda **o: keras.optimizers.Adagrad(**{"learning_rate": 0.1, **o}),
    "adadelta": lambda **o: keras.optimizers.Adadelta(**{"learning_rate": 1.0, **o}),
    "adamax": lambda **o: keras.optimizers.Adamax(**{"learning_rate": 0.01, **o}),
    "nadam": lambda **o: keras.optimizers.Nadam(**{"learning_rate": 0.01, **o}),
    "ftrl": lambda **o: keras.optimizers.Ftrl(
        **{
            "learning_rate": 0.1, "l1_regularization_strength": 0.01, "l2_regularization_strength": 0.01, "beta": 0.1,
            "l2_shrinkage_regularization_strength": 0.01, **o,
        }
    ),
    "lion": lambda **o: keras.optimizers.Lion(**{"learning_rate": 0.01, **o}),
    "lamb": lambda **o: keras.optimizers.Lamb(**{"learning_rate": 0.01, **o}),
    "adafactor": lambda **o: keras.optimizers.Adafactor(**{"learning_rate": 0.01, **o}),
    "muon": lambda **o: keras.optimizers.Muon(**{"learning_rate": 0.01, "adam_weight_decay": 0.1, **o}),
    "muon_plain": lambda **o: keras.optimizers.Muon(
        **{"learning_rate": 0.01, "nesterov": False, "rms_rate": None, "adam_lr_ratio": 0.5, "exclude_layers": ["tall"],
           "exclude_embeddings": False, **o}
    ),
    "schedule_free": lambda **o: keras.optimizers.ScheduleFreeAdamW(
        **{"learning_rate": 0.01, "warmup_steps": 4, **o}
    ),
    "own_formula": lambda **o: Signed(**o),
    "own_subclass": lambda **o: Halved(**{"learning_rate": 0.01, **o}),
    "own_arguments": lambda **o: Preset(**o),
}  # fmt: skip
# Options that do not hide one another, so that three runs of a class show all of them.
OPTIONS = {
    "plain": {},
    "decay_clipnorm_schedule": {
        "weight_decay": 0.1, "clipnorm": 0.5,
        "learning_rate": SCHEDULES.CosineDecay(0.01, 12, alpha=0.1, warmup_target=0.02, warmup_steps=4),
    },
    "accumulation_global_clipnorm_average": {
        "gradient_accumulation_steps": 2, "global_clipnorm": 0.5, "use_ema": True, "ema_momentum": 0.7,
        "learning_rate": SCHEDULES.ExponentialDecay(0.02, 4, 0.7),
    },
    "clipvalue_overwriting_average": {
        "clipvalue": 0.2, "use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 3,
    },
}  # fmt: skip
ALL_SCHEDULES = {
    "ExponentialDecay": SCHEDULES.ExponentialDecay(0.1, 4, 0.5, staircase=True),
    "PiecewiseConstantDecay": SCHEDULES.PiecewiseConstantDecay([3, 9], [0.1, 0.03, 0.01]),
    "PolynomialDecay": SCHEDULES.PolynomialDecay(0.1, 8, 0.01, power=0.5, cycle=True),
    "InverseTimeDecay": SCHEDULES.InverseTimeDecay(0.1, 4, 0.5),
    "CosineDecay": SCHEDULES.CosineDecay(0.01, 12, alpha=0.1, warmup_target=0.1, warmup_steps=4),
    "CosineDecayRestarts": SCHEDULES.CosineDecayRestarts(0.1, 5, t_mul=1.5, m_mul=0.8),
}


def draw(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=shape).astype("float32") for path, shape in shapes.items()}


def nest(flat):
    tree = {}
    for path, value in flat.items():
        layer, name = path.split("/")
        tree.setdefault(layer, {})[name] = value
    return tree


def made(case, **options):
    if case == "adadelta" and "learning_rate" in options:  # its own rate is a hundred times the others'
        options["learning_rate"] = SCHEDULES.PiecewiseConstantDecay([3, 9], [1.0, 3.0, 2.0])
    optimizer = CLASSES[case](**options)
    if options.get("weight_decay"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def keras_updates(optimizer, start, gradients):
    """Let a Keras object update Keras variables, and list their values."""
    variables = []
    for path, value in start.items():
        layer, name = path.split("/")
        with keras.name_scope(layer):
            variables.append(keras.Variable(value, name=name))
    optimizer.build(variables)
    # The pure form, compiled once: the same code as `apply`, twenty times faster.
    step = jax.jit(optimizer.stateless_apply)
    state, values = [v.value for v in optimizer.variables], [v.value for v in variables]
    for number in range(STEPS):
        values, state = step(state, list(gradients(number).values()), values)
    for variable, value in zip([*variables, *optimizer.variables], [*values, *state], strict=True):
        variable.assign(value)
    return dict(zip(start, map(np.asarray, variables), strict=True))


def resolve(optimizer):
    return resolve_optimizer(optimizer, is_language_model=False, is_pretrained=False)


def run(transformation, params, steps, gradients, window=1):
    """Make updates as a training step does; a window's gradients are averaged."""
    hooks = as_step_transformation(transformation)
    state = hooks.init(params)

    @jax.jit
    def batch(params, state):
        return (params, state) if hooks.after_batch is None else hooks.after_batch(params, state)

    @jax.jit
    def update(params, state, g):
        changes, state = hooks.update(jax.tree.map(lambda x: x / window, g), state, params)
        return optax.apply_updates(params, changes), state

    for step in range(steps // window):
        parts = [gradients(step * window + part) for part in range(window)]
        for _ in parts[1:]:
            params, state = batch(params, state)
        params, state = update(params, state, jax.tree.map(lambda *leaves: sum(leaves), *parts))
    return params, state


def assert_equal_updates(got, want, start):
    for path, wanted in want.items():
        layer, name = path.split("/")
        assert np.abs(wanted - start[path]).max() > 1e-3, "the case must move the weights to say anything"
        error = np.abs(np.asarray(got[layer][name]) - wanted).max() / np.abs(wanted).max()
        assert error < 1e-5, f"{path} differs by {error:.1e}"


# Options act outside the formula, so that they are run with one form of each class.
VARIANTS = {"amsgrad", "momentum", "nesterov", "centered", "muon_plain", "own_arguments"}
RUNS = [(case, options) for case in CLASSES for options in OPTIONS if case not in VARIANTS or options == "plain"]


@pytest.mark.parametrize("case, options", RUNS)
def test_twenty_batches_change_the_weights_as_keras_does(case, options):
    shapes = MUON_SHAPES if case.startswith("muon") else SHAPES
    start, window = draw(0, shapes), OPTIONS[options].get("gradient_accumulation_steps", 1)
    reference = made(case, **OPTIONS[options])
    want = keras_updates(reference, start, lambda step: draw(100 + step, shapes))
    compiled = resolve(made(case, **OPTIONS[options]))
    got, state = run(compiled.build(StackView()), nest(start), STEPS, lambda s: nest(draw(100 + s, shapes)), window)
    assert_equal_updates(got, want, start)
    assert int(state.count) == STEPS // window
    if OPTIONS[options].get("use_ema"):
        means = dict(zip(start, map(np.asarray, reference._model_variables_moving_average), strict=True))
        assert_equal_updates(state.slots["average"], means, start)
    assert not compiled.public.built, "the user's object is not touched"


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_every_schedule_is_followed(name, accumulation):
    assert set(ALL_SCHEDULES) == {n for n in dir(SCHEDULES) if n[0].isupper()} - {"LearningRateSchedule"}
    start, window = draw(0), accumulation or 1
    options = {"learning_rate": ALL_SCHEDULES[name], "gradient_accumulation_steps": accumulation}
    want = keras_updates(keras.optimizers.SGD(**options), start, lambda step: draw(100 + step))
    transformation = resolve(keras.optimizers.SGD(**options)).build(StackView())
    got, _ = run(transformation, nest(start), STEPS, lambda s: nest(draw(100 + s)), window)
    assert_equal_updates(got, want, start)


@pytest.mark.parametrize("accumulation", [None, 2])
def test_every_weight_follows_the_optimizer_that_its_path_is_mapped_to(accumulation):
    def multi():
        common = {"gradient_accumulation_steps": accumulation}
        average = {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2}
        table = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01, global_clipnorm=0.5, **common))
        table["dense/k.*"] = keras.optimizers.SGD(0.1, momentum=0.5, **average, **common)
        return keras.optimizers.MultiOptimizer(table)

    start = draw(0)
    want = keras_updates(multi(), start, lambda step: draw(100 + step))
    compiled = resolve(multi())
    got, state = run(
        compiled.build(StackView()), nest(start), STEPS, lambda s: nest(draw(100 + s)), compiled.accumulation
    )
    assert_equal_updates(got, want, start)
    assert [sorted(found.slots) for found in jax.tree.leaves(state, is_leaf=lambda n: hasattr(n, "slots"))] == [
        ["average", "momentum"], ["momentum", "velocity"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "case", ["lamb", "adafactor", "muon", "own_formula", "own_subclass", "schedule_free", "adamw", "clipnorm"]
)
def test_layers_in_a_bank_are_updated_as_if_stored_apart(case):
    view = StackView((Bank("layers_0_1", ("layers_0", "layers_1")),))
    flat = {f"layers_{i}/{name}": draw(i)[f"dense/{name}"] for i in range(2) for name in ("kernel", "bias")}

    def gradients(step):
        return {path: (1 + 2 * path.startswith("layers_1")) * draw(50 + step)[f"dense/{path[9:]}"] for path in flat}

    def optimizer():
        if case == "clipnorm":
            return keras.optimizers.SGD(0.1, clipnorm=0.5)
        made = CLASSES[case](weight_decay=0.1, **({"exclude_layers": ["layers_1"]} if case == "muon" else {}))
        made.exclude_from_weight_decay(var_names=["layers_1/bias", "kernel"])
        return made

    apart, _ = run(resolve(optimizer()).build(StackView()), nest(flat), 5, lambda s: nest(gradients(s)))
    bank, _ = run(resolve(optimizer()).build(view), view.stack(nest(flat)), 5, lambda s: view.stack(nest(gradients(s))))
    for i in range(2):
        for name in ("kernel", "bias"):
            assert np.abs(apart[f"layers_{i}"][name] - flat[f"layers_{i}/{name}"]).max() > 1e-3
            np.testing.assert_allclose(bank["layers_0_1"][name][i], apart[f"layers_{i}"][name], rtol=1e-5, atol=1e-6)


def test_a_bank_whose_layers_have_different_optimizers_is_refused():
    table = keras.optimizers.OptimizerMap(keras.optimizers.SGD(), {"layers_0/.*": keras.optimizers.Adam()})
    view = StackView((Bank("layers_0_1", ("layers_0", "layers_1")),))
    transformation = resolve(keras.optimizers.MultiOptimizer(table)).build(view)
    with pytest.raises(ValueError, match=r"layers_0..1/b is stored as one bank.*scan_layers=False"):
        transformation.init({"layers_0_1": {"b": jnp.ones((2, 4))}})


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
    assert float(resolve({"class_name": name, "config": {"learning_rate": 0.5}}).public.learning_rate) == 0.5


def test_every_class_of_keras_is_known():
    special = {"Optimizer", "OptimizerMap", "MultiOptimizer", "LossScaleOptimizer", "Lamb"}
    classes = {name.lower() for name in dir(keras.optimizers) if name[0].isupper() and name not in special}
    assert classes == set(OPTIMIZER_NAMES)


def test_an_assigned_rate_is_reported_once():
    compiled = resolve(keras.optimizers.SGD(0.5))
    assert compiled.changed_rates() == {0: 0.5}
    assert compiled.changed_rates() == {}
    compiled.public.learning_rate = 0.25
    assert compiled.changed_rates() == {0: 0.25}
    assert compiled.changed_rates() == {}


def test_a_schedule_assigned_later_says_what_to_do():
    compiled = resolve(keras.optimizers.SGD(0.5))
    compiled.public.learning_rate = ALL_SCHEDULES["CosineDecay"]
    with pytest.raises(ValueError, match="compiled again with the same optimizer"):
        compiled.changed_rates()


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


def test_variables_of_keras_cannot_be_excluded_from_decay():
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_list=[keras.Variable([1.0])])
    with pytest.raises(ValueError, match=r"Use var_names=\[...\] with parts of parameter paths"):
        resolve(optimizer)


class OwnScale(keras.optimizers.LossScaleOptimizer):
    """A wrapper of the user's own."""


@pytest.mark.parametrize(
    "optimizer, text",
    [
        (lambda: OwnScale(keras.optimizers.SGD()), "LossScaleOptimizer itself"),
        (lambda: keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD()), "OptimizerMap"),
        (
            lambda: keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(
                    keras.optimizers.SGD(), {"a": keras.optimizers.SGD(gradient_accumulation_steps=2)}
                )
            ),
            r"same gradient_accumulation_steps. Received: \[1, 2\]",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(optimizer, text):
    with pytest.raises(ValueError, match=text):
        resolve(optimizer())


def test_rates_that_harm_pretrained_weights_are_recognised():
    auto = resolve_optimizer("auto", is_language_model=True, is_pretrained=True)
    assert float(auto.public.learning_rate) == pytest.approx(2e-5)
    assert high_rate(auto) is None
    assert high_rate(resolve(keras.optimizers.Adam(1e-3))) == pytest.approx(1e-3)
    assert high_rate(resolve(keras.optimizers.Adam(SCHEDULES.ExponentialDecay(0.01, 10, 0.5)))) == pytest.approx(0.01)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    assert high_rate(resolve(scaled)) == pytest.approx(1e-3)

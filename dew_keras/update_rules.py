"""The update formulas of Keras' optimizers, one weight at a time, as pure functions.

Each rule names the arrays it keeps per weight and returns the change of the weight. Entry points: `rule_of`,
`has_rule`. The formulas follow `keras.optimizers`, where epsilon and bias correction sit differently from optax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import keras
from jax import Array

Slots = Mapping[str, Array]
Step = Callable[[Array, Array, Slots, "Moment"], tuple[Array, dict[str, Array]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """What every weight's update of one step shares.

    Attributes:
        rate: Learning rate, a scalar.
        count: Updates including this one, a float scalar that starts at 1.
        product: Running product of Nadam's momentum schedule, this step included; 1.0 for the others.
    """

    rate: Array
    count: Array
    product: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """How one optimizer changes a weight.

    Attributes:
        step: Maps (gradient, weight, slots, moment) to (change of the weight, new slots).
        slots: Array kept per weight by name, with its first value; None starts as the weight itself.
        decay: Weight decay per unit of learning rate, or None.
        is_elementwise: False where the formula reduces over a whole weight, so that the layers of a bank
            must be treated one by one.
        momentum_schedule: Nadam's beta_1, whose schedule multiplies up over the steps; None otherwise.
        factored: Whether "row" and "column" slots lack the last and the last but one dimension.
        other: The rule of the weights that this one does not take, or None when it takes all.
        takes: Says of a weight's path and number of dimensions, both of one layer, whether this rule takes it.
    """

    step: Step
    slots: Mapping[str, float | None]
    decay: float | None = None
    is_elementwise: bool = True
    momentum_schedule: float | None = None
    factored: bool = False
    other: UpdateRule | None = None
    takes: Callable[[str, int], bool] = lambda path, ndim: True

    def of(self, path: str, ndim: int) -> UpdateRule:
        """Return the rule that updates a weight.

        Args:
            path: The weight's path, of one layer.
            ndim: Its number of dimensions there.
        """
        return self if self.other is None or self.takes(path, ndim) else self.other

    @property
    def own_slots(self) -> tuple[str, ...]:
        """Names of the arrays that a weight of this rule keeps."""
        return (*self.slots, "row", "column") if self.factored else tuple(self.slots)

    @property
    def all_slots(self) -> tuple[str, ...]:
        """Names of the arrays that some weight keeps."""
        others = () if self.other is None else self.other.own_slots
        return tuple(dict.fromkeys((*self.own_slots, *others)))


def has_rule(optimizer: Any) -> bool:
    """Say whether an optimizer's class is one of Keras' own, or changes no more than their arguments.

    Args:
        optimizer: A Keras optimizer object.
    """
    return _keras_class(type(optimizer)) is not None


def rule_of(optimizer: Any) -> UpdateRule:
    """Find the update rule of a Keras optimizer object.

    Args:
        optimizer: One for which `has_rule` holds.
    """
    known = _keras_class(type(optimizer))
    assert known is not None, f"{type(optimizer).__name__} has a formula of its own"
    rule = RULES[known](optimizer)
    return dataclasses.replace(rule, decay=optimizer.weight_decay)


def _keras_class(cls: type) -> type | None:
    for ancestor in cls.__mro__:
        if ancestor in RULES:
            return ancestor
        if not set(vars(ancestor)) <= ARGUMENTS_ONLY:
            return None
    return None


def nadam_momentum(beta_1: float, count: Array) -> Array:
    """Compute Nadam's scheduled momentum at an update.

    Args:
        beta_1: Final momentum.
        count: Number of the update, from 1.
    """
    return beta_1 * (1.0 - 0.5 * 0.96**count)


def _moving(average: Array, value: Array, decay: float) -> Array:
    return average + (value - average) * (1 - decay)


def _adam_step(
    beta_1: float, beta_2: float, epsilon: float, *, amsgrad: bool = False, rate_factor: float = 1.0
) -> Step:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        m = _moving(slots["momentum"], g, beta_1)
        v = _moving(slots["velocity"], jnp.square(g), beta_2)
        kept = {"momentum": m, "velocity": v}
        alpha = rate_factor * now.rate * jnp.sqrt(1 - beta_2**now.count) / (1 - beta_1**now.count)
        if amsgrad:
            v = jnp.maximum(slots["velocity_hat"], v)
            kept["velocity_hat"] = v
        return -(m * alpha) / (jnp.sqrt(v) + epsilon), kept

    return step


def _adam(o: Any) -> UpdateRule:
    names = ("momentum", "velocity", "velocity_hat") if o.amsgrad else ("momentum", "velocity")
    step = _adam_step(o.beta_1, o.beta_2, o.epsilon, amsgrad=o.amsgrad)
    return UpdateRule(step=step, slots=dict.fromkeys(names, 0.0))


def _muon(o: Any) -> UpdateRule:
    def orthogonal(x: Array) -> Array:
        a, b, c = o.muon_a, o.muon_b, o.muon_c
        is_tall = x.shape[0] > x.shape[1]
        x = x.T if is_tall else x
        x = x / (jnp.linalg.norm(x) + 1e-7)
        for _ in range(o.ns_steps):
            gram = x @ x.T
            x = a * x + (b * gram + (c * gram) @ gram) @ x
        return x.T if is_tall else x

    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        m = slots["momentum"] + (g + slots["momentum"] * (o.momentum - 1))
        change = now.rate * orthogonal(g + o.momentum * m if o.nesterov else m)
        if o.rms_rate is not None:
            change = change * jnp.sqrt(float(max(w.shape))) * o.rms_rate
        return -change, {"momentum": m}

    def takes(path: str, ndim: int) -> bool:
        if ndim != 2 or (o.exclude_embeddings and "embedding" in path.lower()):
            return False
        return not any(re.search(keyword, path) for keyword in o.exclude_layers)

    adam = UpdateRule(
        step=_adam_step(o.adam_beta_1, o.adam_beta_2, o.epsilon, rate_factor=o.adam_lr_ratio),
        slots={"momentum": 0.0, "velocity": 0.0},
        decay=o.adam_weight_decay,
    )
    return UpdateRule(step=step, slots={"momentum": 0.0}, is_elementwise=False, other=adam, takes=takes)


def _schedule_free_adamw(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        rate = now.rate * jnp.minimum(now.count / o.warmup_steps, 1.0) if o.warmup_steps > 0 else now.rate
        v = _moving(slots["velocity"], jnp.square(g), o.beta_2)
        z = slots["momentum"] - rate * g / (jnp.sqrt(v / (1 - o.beta_2**now.count)) + o.epsilon)
        # The weights are y; the averaged x is what y and the old z were mixed from.
        x = (w - (1 - o.beta_1) * slots["momentum"]) / o.beta_1
        x = (1 - 1 / now.count) * x + z / now.count
        return (1 - o.beta_1) * z + o.beta_1 * x - w, {"momentum": z, "velocity": v}

    return UpdateRule(step=step, slots={"momentum": None, "velocity": 0.0})


def _sgd(o: Any) -> UpdateRule:
    def plain(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        return -(g * now.rate), {}

    def with_momentum(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        m = slots["momentum"] * o.momentum - g * now.rate
        return (m * o.momentum - g * now.rate if o.nesterov else m), {"momentum": m}

    if o.momentum:
        return UpdateRule(step=with_momentum, slots={"momentum": 0.0})
    return UpdateRule(step=plain, slots={})


def _rmsprop(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        v = o.rho * slots["velocity"] + (1 - o.rho) * jnp.square(g)
        kept = {"velocity": v}
        denominator = v + o.epsilon
        if o.centered:
            kept["average_gradient"] = o.rho * slots["average_gradient"] + (1 - o.rho) * g
            denominator = v - jnp.square(kept["average_gradient"]) + o.epsilon
        change = now.rate * g / jnp.sqrt(denominator)
        if o.momentum > 0:
            change = o.momentum * slots["momentum"] + change
            kept["momentum"] = change
        return -change, kept

    names = ["velocity"] + ["momentum"] * (o.momentum > 0) + ["average_gradient"] * bool(o.centered)
    return UpdateRule(step=step, slots=dict.fromkeys(names, 0.0))


def _adagrad(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        a = slots["accumulator"] + jnp.square(g)
        return -(now.rate * g) / jnp.sqrt(a + o.epsilon), {"accumulator": a}

    return UpdateRule(step=step, slots={"accumulator": o.initial_accumulator_value})


def _adadelta(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        a = o.rho * slots["accumulated_grad"] + (1 - o.rho) * jnp.square(g)
        delta = -jnp.sqrt(slots["accumulated_delta"] + o.epsilon) * g / jnp.sqrt(a + o.epsilon)
        d = o.rho * slots["accumulated_delta"] + (1 - o.rho) * jnp.square(delta)
        return now.rate * delta, {"accumulated_grad": a, "accumulated_delta": d}

    return UpdateRule(step=step, slots={"accumulated_grad": 0.0, "accumulated_delta": 0.0})


def _adamax(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        m = _moving(slots["momentum"], g, o.beta_1)
        u = jnp.maximum(o.beta_2 * slots["norm"], jnp.abs(g))
        return -(now.rate * m) / ((1 - o.beta_1**now.count) * (u + o.epsilon)), {"momentum": m, "norm": u}

    return UpdateRule(step=step, slots={"momentum": 0.0, "norm": 0.0})


def _nadam(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        u, u_next = nadam_momentum(o.beta_1, now.count), nadam_momentum(o.beta_1, now.count + 1)
        m = _moving(slots["momentum"], g, o.beta_1)
        v = _moving(slots["velocity"], jnp.square(g), o.beta_2)
        m_hat = u_next * m / (1 - now.product * u_next) + (1 - u) * g / (1 - now.product)
        v_hat = v / (1 - o.beta_2**now.count)
        return -(m_hat * now.rate) / (jnp.sqrt(v_hat) + o.epsilon), {"momentum": m, "velocity": v}

    return UpdateRule(step=step, slots={"momentum": 0.0, "velocity": 0.0}, momentum_schedule=o.beta_1)


def _lion(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        m = slots["momentum"]
        change = -now.rate * jnp.sign(m * o.beta_1 + g * (1 - o.beta_1))
        return change, {"momentum": m * o.beta_2 + g * (1 - o.beta_2)}

    return UpdateRule(step=step, slots={"momentum": 0.0})


def _ftrl(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        power = -o.learning_rate_power
        old, new = slots["accumulator"], slots["accumulator"] + jnp.square(g)
        sigma = (new**power - old**power) / now.rate
        linear = slots["linear"] + g + 2 * o.l2_shrinkage_regularization_strength * w - sigma * w
        l2 = o.l2_regularization_strength + o.beta / (2.0 * now.rate)
        clipped = jnp.clip(linear, -o.l1_regularization_strength, o.l1_regularization_strength)
        target = (clipped - linear) / (new**power / now.rate + 2 * l2)
        return target - w, {"accumulator": new, "linear": linear}

    return UpdateRule(step=step, slots={"accumulator": o.initial_accumulator_value, "linear": 0.0})


def _lamb(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        m = _moving(slots["momentum"], g, o.beta_1)
        v = _moving(slots["velocity"], jnp.square(g), o.beta_2)
        change = (m / (1 - o.beta_1**now.count)) / (jnp.sqrt(v / (1 - o.beta_2**now.count)) + o.epsilon)
        w_norm, c_norm = jnp.sqrt(jnp.sum(jnp.square(w))), jnp.sqrt(jnp.sum(jnp.square(change)))
        ratio = jnp.where((w_norm > 0) & (c_norm > 0), w_norm / jnp.where(c_norm > 0, c_norm, 1.0), 1.0)
        return -ratio * now.rate * change, {"momentum": m, "velocity": v}

    return UpdateRule(step=step, slots={"momentum": 0.0, "velocity": 0.0}, is_elementwise=False)


def _adafactor(o: Any) -> UpdateRule:
    def rms(x: Array) -> Array:
        return jnp.sqrt(jnp.mean(jnp.square(x)))

    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        rho = jnp.minimum(now.rate, 1 / jnp.sqrt(now.count))
        alpha = jnp.maximum(o.epsilon_2, rms(w)) * rho
        squared = jnp.square(g) + o.epsilon_1
        decay = 1 - now.count**o.beta_2_decay
        if g.ndim >= 2:
            row = decay * slots["row"] + (1 - decay) * jnp.mean(squared, axis=-1)
            column = decay * slots["column"] + (1 - decay) * jnp.mean(squared, axis=-2)
            v = (row / jnp.mean(row, axis=-1, keepdims=True))[..., None] * column[..., None, :]
            kept = {"row": row, "column": column}
        else:
            v = decay * slots["velocity"] + (1 - decay) * squared
            kept = {"velocity": v}
        u = g / jnp.sqrt(v)
        return -alpha * u / jnp.maximum(1.0, rms(u) / o.clip_threshold), kept

    return UpdateRule(step=step, slots={"velocity": 0.0}, is_elementwise=False, factored=True)


RULES: dict[type, Callable[[Any], UpdateRule]] = {
    keras.optimizers.Adadelta: _adadelta,
    keras.optimizers.Adafactor: _adafactor,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adamax: _adamax,
    keras.optimizers.Ftrl: _ftrl,
    keras.optimizers.Lamb: _lamb,
    keras.optimizers.Lion: _lion,
    keras.optimizers.Muon: _muon,
    keras.optimizers.Nadam: _nadam,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.SGD: _sgd,
    keras.optimizers.ScheduleFreeAdamW: _schedule_free_adamw,
}
# What a subclass may define without changing how weights are updated.
ARGUMENTS_ONLY = {
    "__annotations__",
    "__annotate_func__",
    "__annotations_cache__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__init__",
    "__module__",
    "__qualname__",
    "__static_attributes__",
    "__weakref__",
    "from_config",
    "get_config",
}

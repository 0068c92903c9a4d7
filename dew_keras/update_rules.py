"""The update formulas of Keras' optimizers, one weight at a time, as pure functions.

Each rule names the arrays it keeps per weight and returns the change of the weight. Entry point: `rule_of`.
The formulas follow `keras.optimizers`, where epsilon and bias correction sit differently from optax.
"""

from __future__ import annotations

import dataclasses
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
        slots: Array kept per weight by name, with its first value.
        is_elementwise: False where the formula reduces over a whole weight, so that the layers of a bank
            must be treated one by one.
        momentum_schedule: Nadam's beta_1, whose schedule multiplies up over the steps; None otherwise.
        factored: Whether "row" and "column" slots lack the last and the last but one dimension.
    """

    step: Step
    slots: Mapping[str, float]
    is_elementwise: bool = True
    momentum_schedule: float | None = None
    factored: bool = False


def rule_of(optimizer: Any) -> UpdateRule:
    """Find the update rule of a Keras optimizer object.

    Args:
        optimizer: An instance of a class of `keras.optimizers`.

    Raises:
        ValueError: If its class has no rule here; a subclass has none, since it may change the formula.
    """
    make = RULES.get(type(optimizer))
    if make is None:
        names = ", ".join(sorted(cls.__name__ for cls in RULES))
        raise ValueError(
            f"keras.optimizers.{type(optimizer).__name__} is not mapped to an update on a mesh. Use one of {names}, "
            f"or an optax transformation. Received: optimizer={optimizer!r}"
        )
    return make(optimizer)


def nadam_momentum(beta_1: float, count: Array) -> Array:
    """Compute Nadam's scheduled momentum at an update.

    Args:
        beta_1: Final momentum.
        count: Number of the update, from 1.
    """
    return beta_1 * (1.0 - 0.5 * 0.96**count)


def _moving(average: Array, value: Array, decay: float) -> Array:
    return average + (value - average) * (1 - decay)


def _adam(o: Any) -> UpdateRule:
    def step(g: Array, w: Array, slots: Slots, now: Moment) -> tuple[Array, dict[str, Array]]:
        m = _moving(slots["momentum"], g, o.beta_1)
        v = _moving(slots["velocity"], jnp.square(g), o.beta_2)
        kept = {"momentum": m, "velocity": v}
        alpha = now.rate * jnp.sqrt(1 - o.beta_2**now.count) / (1 - o.beta_1**now.count)
        if o.amsgrad:
            v = jnp.maximum(slots["velocity_hat"], v)
            kept["velocity_hat"] = v
        return -(m * alpha) / (jnp.sqrt(v) + o.epsilon), kept

    names = ("momentum", "velocity", "velocity_hat") if o.amsgrad else ("momentum", "velocity")
    return UpdateRule(step=step, slots=dict.fromkeys(names, 0.0))


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
    keras.optimizers.Nadam: _nadam,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.SGD: _sgd,
}

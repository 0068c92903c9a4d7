"""A Keras optimizer as an optax transformation: its rate, decay, clipping, moving average and update of every weight.

Entry points: `keras_transformation`, `KerasState`. The formulas are in `update_rules.py`; optimizers whose formula is
the user's own are run by `hosted.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from dew.placement.stacks import StackView
from dew.training.optimizer import StepTransformation
from dew.tree import path_name
from dew_keras.hosted import hosted_first, hosted_update
from dew_keras.update_rules import Moment, UpdateRule, has_rule, nadam_momentum, rule_of


class KerasState(NamedTuple):
    """State of a Keras optimizer on a mesh.

    Attributes:
        count: Updates applied, int32.
        hyperparams: "learning_rate", the float32 rate of the next update.
        product: Nadam's running momentum product, float32.
        slots: Arrays kept per weight: slot name to a tree like the parameters. "average" is the moving average.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which no tree code calls
    hyperparams: dict[str, jax.Array]
    product: jax.Array
    slots: dict[str, Any]


def rate_source(optimizer: Any) -> Any:
    """Return what gives an optimizer's rate: a schedule, a callable or a variable.

    Args:
        optimizer: A Keras optimizer that has a rate of its own.
    """
    # The public property evaluates a schedule; the schedule itself is needed to trace it.
    return optimizer._learning_rate


def rate_value(source: Any) -> float:
    """Read a rate that is no schedule.

    Args:
        source: A callable, a variable or a number.
    """
    return float(source() if callable(source) else source)


def keras_transformation(optimizer: Any, view: StackView) -> StepTransformation:
    """Build the optax transformation that makes a Keras optimizer's updates.

    Args:
        optimizer: The Keras object; its numbers are read now, its learning rate is state.
        view: How the model stores layers; formulas that reduce over a weight see one layer at a time.

    Returns:
        A transformation whose state is a `KerasState`.
    """
    rule = rule_of(optimizer) if has_rule(optimizer) else None
    decays = functools.partial(is_decayed, optimizer)
    window = optimizer.gradient_accumulation_steps or 1
    source = rate_source(optimizer)
    schedule = source if isinstance(source, keras.optimizers.schedules.LearningRateSchedule) else None

    def rate_at(count: jax.Array) -> jax.Array:
        # Keras counts batches, not updates, where it accumulates gradients itself.
        assert schedule is not None, "rate_at is for schedules"
        return jnp.asarray(schedule(count * window + window - 1), jnp.float32)

    def init(params: Any) -> KerasState:
        slots = hosted_first(optimizer, view, params, decays) if rule is None else _first(rule, view, params)
        if optimizer.use_ema:
            slots["average"] = jax.tree.map(jnp.zeros_like, params)
        count = jnp.zeros((), jnp.int32)
        rate = rate_at(count) if schedule else jnp.asarray(rate_value(source), jnp.float32)
        return KerasState(count, {"learning_rate": rate}, jnp.ones((), jnp.float32), slots)

    def update(gradients: Any, state: KerasState, params: Any = None) -> tuple[Any, KerasState]:
        rate = rate_at(state.count) if schedule else state.hyperparams["learning_rate"]
        count = (state.count + 1).astype(jnp.float32)
        product = state.product
        if rule is not None and rule.momentum_schedule is not None:
            product = product * nadam_momentum(rule.momentum_schedule, count)
        now = Moment(rate=rate, count=count, product=product)
        slots = {name: tree for name, tree in state.slots.items() if name != "average"}
        if rule is None:
            changes, slots = hosted_update(optimizer, view, gradients, params, slots, now, decays)
        else:
            changes, slots = _ruled_update(optimizer, rule, view, gradients, params, slots, now)
        if optimizer.use_ema:
            fresh = jax.tree.map(jnp.add, params, changes)
            fresh, slots["average"] = _averaged(optimizer, fresh, state.slots["average"], state.count)
            if optimizer.ema_overwrite_frequency:
                changes = jax.tree.map(jnp.subtract, fresh, params)
        return changes, KerasState(state.count + 1, {"learning_rate": rate}, product, slots)

    def after_batch(params: Any, state: KerasState) -> tuple[Any, KerasState]:
        # Keras averages after every batch, also where it has only summed the gradient.
        params, average = _averaged(optimizer, params, state.slots["average"], state.count)
        return params, state._replace(slots={**state.slots, "average": average})

    is_averaging = bool(optimizer.use_ema and optimizer.gradient_accumulation_steps)
    return StepTransformation(init, update, after_batch=after_batch if is_averaging else None)


def is_decayed(optimizer: Any, path: str) -> bool:
    """Say whether weight decay acts on a weight.

    Args:
        optimizer: The Keras object.
        path: The weight's path, of one layer.
    """
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    return pattern is None or re.search(pattern, path) is None


def _ruled_update(
    optimizer: Any,
    rule: UpdateRule,
    view: StackView,
    gradients: Any,
    params: Any,
    slots: dict[str, Any],
    now: Moment,
) -> tuple[Any, dict[str, Any]]:
    weights, g = _leaves(params), [g for _, g in _leaves(gradients)]
    known = {name: [leaf for _, leaf in _leaves(tree)] for name, tree in slots.items()}
    g = _clipped(optimizer, g, [view.bank_of(path) is not None for path, _ in weights])
    changes: list[Any] = []
    kept: dict[str, list[Any]] = {name: [] for name in known}
    for index, (path, weight) in enumerate(weights):
        own = {name: leaves[index] for name, leaves in known.items()}
        change, new = _one(optimizer, rule, view, path, weight, g[index], own, now)
        for name in own:
            kept[name].append(new.get(name, own[name]))
        changes.append(change)
    return _like(params, changes), {name: _like(params, leaves) for name, leaves in kept.items()}


def _one(
    optimizer: Any, rule: UpdateRule, view: StackView, path: str, weight: Any, g: Any, own: dict[str, Any], now: Moment
) -> tuple[Any, dict[str, Any]]:
    """Update one stored weight: by one rule, or by each layer's own where the layers of a bank differ."""
    rules = _layer_rules(rule, view, path, weight.ndim)
    change, new = _by(optimizer, rules[0], view, path, weight, g, own, now)
    for other in rules[1:]:
        if other is rules[0]:
            continue
        second, more = _by(optimizer, other, view, path, weight, g, own, now)
        is_first = jnp.asarray([found is rules[0] for found in rules])
        pick = lambda a, b: jnp.where(is_first.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)  # noqa: E731, B023
        names = {*new, *more}
        new = {name: pick(new.get(name, own[name]), more.get(name, own[name])) for name in names}
        change = pick(change, second)
        break  # a rule has one other
    return change, new


def _layer_rules(rule: UpdateRule, view: StackView, path: str, ndim: int) -> list[UpdateRule]:
    is_banked = view.bank_of(path) is not None
    return [rule.of(logical, ndim - is_banked) for logical in view.logical_paths(path)]


def _by(
    optimizer: Any, rule: UpdateRule, view: StackView, path: str, weight: Any, g: Any, own: dict[str, Any], now: Moment
) -> tuple[Any, dict[str, Any]]:
    """Decay one weight, then apply the rule: Keras decays before the update sees the weight."""
    g = g.astype(weight.dtype)
    decayed = weight
    if rule.decay is not None:
        decayed = weight - weight * rule.decay * now.rate * _decay_mask(optimizer, view, path, weight.ndim)

    def step(g: Any, w: Any, slots: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return rule.step(g, w, slots, now)

    if not rule.is_elementwise and view.bank_of(path) is not None:
        step = jax.vmap(step)
    change, new = step(g, decayed, own)
    return (decayed - weight) + change, new


def _decay_mask(optimizer: Any, view: StackView, path: str, ndim: int) -> Any:
    kept = [float(is_decayed(optimizer, logical)) for logical in view.logical_paths(path)]
    if len(set(kept)) == 1:
        return kept[0]
    return jnp.asarray(kept, jnp.float32).reshape((-1,) + (1,) * (ndim - 1))


def _averaged(optimizer: Any, params: Any, average: Any, count: Any) -> tuple[Any, Any]:
    """Take weights into their moving average, and hand the average back where it is due to overwrite them."""

    def step(weight: Any, average: Any) -> Any:
        momentum = jnp.where(count != 0, optimizer.ema_momentum, 0.0).astype(weight.dtype)
        return momentum * average + (1 - momentum) * weight

    average = jax.tree.map(step, params, average)
    if optimizer.ema_overwrite_frequency:
        overwrite = (count + 1) % optimizer.ema_overwrite_frequency == 0
        params = jax.tree.map(lambda weight, mean: jnp.where(overwrite, mean, weight), params, average)
    return params, average


def _clipped(optimizer: Any, gradients: list[Any], banked: Sequence[bool]) -> list[Any]:
    def by_norm(g: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(jnp.square(g)))
        return g * optimizer.clipnorm / jnp.maximum(norm, optimizer.clipnorm)

    # Keras clips by the first of these that is positive.
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        return [jax.vmap(by_norm)(g) if many else by_norm(g) for g, many in zip(gradients, banked, strict=True)]
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        limit = optimizer.global_clipnorm
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
        return [g * (limit / jnp.maximum(norm, limit)) for g in gradients]
    if optimizer.clipvalue and optimizer.clipvalue > 0:
        return [jnp.clip(g, -optimizer.clipvalue, optimizer.clipvalue) for g in gradients]
    return gradients


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in flat]


def _like(params: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(params), list(leaves))


def _first(rule: UpdateRule, view: StackView, params: Any) -> dict[str, Any]:
    """Make the slots before the first update; a weight that does not keep one has a number in its place."""

    def first(name: str, path: str, weight: Any) -> Any:
        is_banked = view.bank_of(path) is not None
        lead = weight.shape[: 1 if is_banked else 0]
        keepers = [found for found in _layer_rules(rule, view, path, weight.ndim) if name in found.own_slots]
        if not keepers:
            return jnp.zeros(lead, weight.dtype)
        shape, value = weight.shape, keepers[0].slots.get(name, 0.0)
        if value is None:
            return jnp.copy(weight)
        if rule.factored:
            matrix = weight.ndim - is_banked >= 2
            if name == "row":
                shape = shape[:-1] if matrix else lead
            elif name == "column":
                shape = shape[:-2] + shape[-1:] if matrix else lead
            elif matrix:
                shape = lead
        return jnp.full(shape, value, weight.dtype)

    weights = _leaves(params)
    return {name: _like(params, [first(name, path, weight) for path, weight in weights]) for name in rule.all_slots}

"""Keras optimizers, by name or object, as optax transformations with Keras' own updates.

Entry points: `resolve_optimizer` and what it returns, `CompiledOptimizer`. The Keras object stays the one a
user reads and assigns: its learning rate is copied into the training state when it changed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import optax

from dew.placement.stacks import StackView
from dew.training.optimizer import read_learning_rate
from dew.tree import path_name
from dew_keras.names import unknown_name
from dew_keras.update_rules import Moment, UpdateRule, nadam_momentum, rule_of

AUTO_PRETRAINED_RATE = 2e-5
HIGH_PRETRAINED_RATE = 1e-3
OPTIMIZER_NAMES = tuple(
    name.lower() for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl")
) + ("lion", "nadam", "rmsprop", "sgd")


class KerasState(NamedTuple):
    """State of a Keras optimizer on a mesh.

    Attributes:
        count: Updates applied, int32.
        hyperparams: "learning_rate", the float32 rate of the next update.
        product: Nadam's running momentum product, float32.
        slots: Arrays kept per weight: slot name to a tree like the parameters.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which no tree code calls
    hyperparams: dict[str, jax.Array]
    product: jax.Array
    slots: dict[str, Any]


class OptaxHandle:
    """What `model.optimizer` is for an optax transformation: its rate and count, in Keras' names."""

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        self.transformation = transformation
        self.iterations = 0
        self.built = True  # callbacks ask before they load weights
        self.assigned_rate: float | None = None
        self.current_state: Callable[[], Any] = lambda: None

    @property
    def learning_rate(self) -> float:
        """The rate of the next update.

        Raises:
            AttributeError: If the transformation keeps no rate in its state, or has no state yet.
        """
        if self.assigned_rate is not None:
            return self.assigned_rate
        state = self.current_state()
        rate = None if state is None else read_learning_rate(state)
        if rate is None:
            raise AttributeError(
                "This optax transformation shows no learning rate. Build it with optax.inject_hyperparams(optax.adamw)"
                "(learning_rate=...), and read the rate after the first fit."
            )
        return float(rate)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.assigned_rate = float(value)


@dataclasses.dataclass
class CompiledOptimizer:
    """An optimizer as `compile` leaves it.

    Attributes:
        public: What `model.optimizer` returns: the Keras object, or a handle on the optax transformation.
        build: Makes the transformation for a model's storage of layers.
        accumulation: Batches per update that the Keras object asks for; 1 when it does not.
        finalizes_average: Whether weights become their moving average when a fit ends.
    """

    public: Any
    build: Callable[[StackView], optax.GradientTransformation]
    accumulation: int = 1
    finalizes_average: bool = False
    _seen_rate: Any = dataclasses.field(default=None, repr=False)

    def changed_rate(self) -> float | None:
        """Return the learning rate when it was assigned since the last call, else None.

        A Keras rate is a variable whose array is replaced by an assignment, so comparing identities costs no
        read of a device.
        """
        if isinstance(self.public, OptaxHandle):
            rate, self.public.assigned_rate = self.public.assigned_rate, None
            return rate
        rate = _rate_source(self.public)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return None
        if callable(rate):
            value = float(rate())
            changed, self._seen_rate = value != self._seen_rate, value
            return value if changed else None
        array = rate.value
        if array is self._seen_rate:
            return None
        self._seen_rate = array
        return float(array)

    def is_same(self, other: CompiledOptimizer) -> bool:
        """Say whether another one was made of the same object, which keeps its state.

        Args:
            other: As another `compile` left it.
        """
        first, second = self.public, other.public
        if isinstance(first, OptaxHandle) and isinstance(second, OptaxHandle):
            return first.transformation is second.transformation
        return first is second

    def take_rate(self, rate: float | None) -> None:
        """Show a rate that the training state has already, without passing it on as an assignment.

        Args:
            rate: The rate; None leaves the shown one.
        """
        if rate is None or isinstance(self.public, OptaxHandle):
            return
        source = _rate_source(self.public)
        if not callable(source):  # neither a schedule nor a function
            self.public.learning_rate = rate
            self.changed_rate()

    def claim(self) -> None:
        """Mark the Keras object as built: its moments live in the training state, and callbacks need not make any."""
        if not isinstance(self.public, OptaxHandle):
            self.public.built = True

    def count_updates(self, updates: int) -> None:
        """Show the number of updates as the optimizer's `iterations`.

        Args:
            updates: Updates applied so far.
        """
        if isinstance(self.public, OptaxHandle):
            self.public.iterations = updates
        elif self.accumulation == 1 and int(self.public.iterations) != updates:
            self.public.iterations.assign(updates)


def resolve_optimizer(optimizer: Any, *, is_language_model: bool, is_pretrained: bool) -> CompiledOptimizer:
    """Turn what `compile` was given into an optimizer for a mesh.

    Args:
        optimizer: A Keras name, config or object, an optax transformation, or "auto": AdamW at 2e-5 for
            pretrained language models, AdamW for others, and Keras' default rmsprop for any other module.
        is_language_model: Whether the module is a language model.
        is_pretrained: Whether its weights come from a checkpoint.

    Raises:
        ValueError: If the name is unknown or the optimizer has no update on a mesh.
        TypeError: If it is no optimizer.
    """
    if isinstance(optimizer, CompiledOptimizer):
        return optimizer
    if isinstance(optimizer, OptaxHandle):
        optimizer = optimizer.transformation
    if isinstance(optimizer, str) and optimizer == "auto":
        optimizer = "rmsprop"
        if is_language_model:
            optimizer = keras.optimizers.AdamW(AUTO_PRETRAINED_RATE) if is_pretrained else keras.optimizers.AdamW()
    if isinstance(optimizer, str):
        if optimizer.lower() not in OPTIMIZER_NAMES:
            raise unknown_name("optimizer", optimizer, OPTIMIZER_NAMES)
        optimizer = keras.optimizers.get(optimizer)
    elif isinstance(optimizer, dict):
        optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return _compiled_keras(optimizer)
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return CompiledOptimizer(OptaxHandle(optimizer), lambda view: optimizer)
    raise TypeError(
        "optimizer must be a Keras optimizer (name, config or object) or an optax transformation. "
        f"Received: optimizer={optimizer!r} of type {type(optimizer).__name__}"
    )


def high_rate(compiled: CompiledOptimizer) -> float | None:
    """Return the first learning rate when it is high for pretrained weights, else None.

    Args:
        compiled: The optimizer; an optax transformation shows its rate too late to be judged here.
    """
    if isinstance(compiled.public, OptaxHandle):
        return None
    rate = _rate_source(compiled.public)
    value = float(rate(0) if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else _host(rate))
    return value if value >= HIGH_PRETRAINED_RATE else None


def _host(rate: Any) -> float:
    return float(rate() if callable(rate) else rate)


def _rate_source(optimizer: Any) -> Any:
    # The public property evaluates a schedule; the schedule itself is needed to trace it.
    return optimizer._learning_rate


def _compiled_keras(optimizer: Any) -> CompiledOptimizer:
    rule = rule_of(optimizer)
    if optimizer.loss_scale_factor is not None:
        raise ValueError(
            "loss_scale_factor is not available: gradients are computed and summed in float32 range here, so leave it "
            f"out. Received: loss_scale_factor={optimizer.loss_scale_factor}"
        )
    if getattr(optimizer, "_exclude_from_weight_decay", None):
        raise ValueError(
            "exclude_from_weight_decay(var_list=...) names Keras variables, which this model does not have. Use "
            "var_names=[...] with parts of parameter paths, such as 'norm/scale'."
        )

    def build(view: StackView) -> optax.GradientTransformation:
        return keras_transformation(optimizer, rule, view)

    return CompiledOptimizer(
        optimizer,
        build,
        accumulation=optimizer.gradient_accumulation_steps or 1,
        finalizes_average=bool(optimizer.use_ema),
    )


def keras_transformation(optimizer: Any, rule: UpdateRule, view: StackView) -> optax.GradientTransformation:
    """Build the optax transformation that makes a Keras optimizer's updates.

    Args:
        optimizer: The Keras object; its numbers are read now, its learning rate is state.
        rule: Its update formula.
        view: How the model stores layers; formulas that reduce over a weight see one layer at a time.

    Returns:
        A transformation whose state is a `KerasState`.
    """
    window = optimizer.gradient_accumulation_steps or 1
    source = _rate_source(optimizer)
    schedule = source if isinstance(source, keras.optimizers.schedules.LearningRateSchedule) else None

    def rate_at(count: jax.Array) -> jax.Array:
        # Keras counts batches, not updates, where it accumulates gradients itself.
        assert schedule is not None, "rate_at is for schedules"
        return jnp.asarray(schedule(count * window + window - 1), jnp.float32)

    def init(params: Any) -> KerasState:
        weights = _leaves(params)
        slots = {name: _like(params, _first(rule, name, view, weights)) for name in _slot_names(rule, weights, view)}
        if optimizer.use_ema:
            slots["average"] = jax.tree.map(jnp.zeros_like, params)
        count = jnp.zeros((), jnp.int32)
        rate = rate_at(count) if schedule else jnp.asarray(_host(source), jnp.float32)
        return KerasState(count, {"learning_rate": rate}, jnp.ones((), jnp.float32), slots)

    def update(gradients: Any, state: KerasState, params: Any = None) -> tuple[Any, KerasState]:
        rate = rate_at(state.count) if schedule else state.hyperparams["learning_rate"]
        count = (state.count + 1).astype(jnp.float32)
        product = state.product
        if rule.momentum_schedule is not None:
            product = product * nadam_momentum(rule.momentum_schedule, count)
        now = Moment(rate=rate, count=count, product=product)
        weights, g = _leaves(params), [g for _, g in _leaves(gradients)]
        slots = {name: [leaf for _, leaf in _leaves(tree)] for name, tree in state.slots.items()}
        g = _clipped(optimizer, g, [view.bank_of(path) is not None for path, _ in weights])
        changes: list[Any] = []
        kept: dict[str, list[Any]] = {name: [] for name in slots}
        for index, (path, weight) in enumerate(weights):
            own = {name: leaves[index] for name, leaves in slots.items() if name != "average"}
            change, new = _one(optimizer, rule, view, path, weight, g[index], own, now)
            for name in own:
                kept[name].append(new.get(name, own[name]))
            if optimizer.use_ema:
                change, average = _average(optimizer, weight, change, slots["average"][index], state.count)
                kept["average"].append(average)
            changes.append(change)
        trees = {name: _like(params, leaves) for name, leaves in kept.items()}
        return _like(params, changes), KerasState(state.count + 1, {"learning_rate": rate}, product, trees)

    return optax.GradientTransformation(init, update)


def _one(
    optimizer: Any, rule: UpdateRule, view: StackView, path: str, weight: Any, g: Any, own: dict[str, Any], now: Moment
) -> tuple[Any, dict[str, Any]]:
    """Decay one weight, then apply the rule: Keras decays before the update sees the weight."""
    g = g.astype(weight.dtype)
    decayed = weight
    if optimizer.weight_decay is not None:
        decayed = weight - weight * optimizer.weight_decay * now.rate * _decay_mask(optimizer, view, path, weight.ndim)

    def step(g: Any, w: Any, slots: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return rule.step(g, w, slots, now)

    if not rule.is_elementwise and view.bank_of(path) is not None:
        step = jax.vmap(step)
    change, new = step(g, decayed, own)
    return (decayed - weight) + change, new


def _decay_mask(optimizer: Any, view: StackView, path: str, ndim: int) -> Any:
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    if pattern is None:
        return 1.0
    kept = [float(re.search(pattern, logical) is None) for logical in view.logical_paths(path)]
    if len(set(kept)) == 1:
        return kept[0]
    return jnp.asarray(kept, jnp.float32).reshape((-1,) + (1,) * (ndim - 1))


def _average(optimizer: Any, weight: Any, change: Any, average: Any, count: Any) -> tuple[Any, Any]:
    momentum = jnp.where(count != 0, optimizer.ema_momentum, 0.0).astype(weight.dtype)
    average = momentum * average + (1 - momentum) * (weight + change)
    if optimizer.ema_overwrite_frequency:
        overwrite = (count + 1) % optimizer.ema_overwrite_frequency == 0
        change = jnp.where(overwrite, average - weight, change)
    return change, average


def _clipped(optimizer: Any, gradients: list[Any], banked: Sequence[bool]) -> list[Any]:
    def by_norm(g: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(jnp.square(g)))
        return g * optimizer.clipnorm / jnp.maximum(norm, optimizer.clipnorm)

    if optimizer.clipnorm:
        return [jax.vmap(by_norm)(g) if many else by_norm(g) for g, many in zip(gradients, banked, strict=True)]
    if optimizer.global_clipnorm:
        limit = optimizer.global_clipnorm
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
        return [g * (limit / jnp.maximum(norm, limit)) for g in gradients]
    if optimizer.clipvalue:
        return [jnp.clip(g, -optimizer.clipvalue, optimizer.clipvalue) for g in gradients]
    return gradients


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in flat]


def _like(params: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(params), list(leaves))


def _slot_names(rule: UpdateRule, weights: Sequence[Any], view: StackView) -> tuple[str, ...]:
    return (*rule.slots, "row", "column") if rule.factored else tuple(rule.slots)


def _first(rule: UpdateRule, name: str, view: StackView, weights: Sequence[tuple[str, Any]]) -> list[Any]:
    def first(path: str, weight: Any) -> Any:
        shape = weight.shape
        if rule.factored:
            matrix = weight.ndim - (view.bank_of(path) is not None) >= 2
            lead = shape[: 1 if view.bank_of(path) is not None else 0]
            if name == "row":
                shape = shape[:-1] if matrix else lead
            elif name == "column":
                shape = shape[:-2] + shape[-1:] if matrix else lead
            elif matrix:
                shape = lead
        value = rule.slots.get(name, 0.0)
        # zeros_like and full_like keep the weight's sharding when the shapes agree.
        return jnp.full(shape, value, weight.dtype)

    return [first(path, weight) for path, weight in weights]

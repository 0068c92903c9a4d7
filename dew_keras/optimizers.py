"""Keras optimizers, by name or object, as optax transformations with Keras' own updates.

Entry points: `resolve_optimizer` and what it returns, `CompiledOptimizer`. The Keras object stays the one a
user reads and assigns: its learning rate is copied into the training state when it changed.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import optax

from dew.placement.stacks import StackView
from dew.training.loss_scale import dynamic_loss_scale, static_loss_scale
from dew.training.optimizer import Optimizer, StepTransformation, assign_learning_rate, read_learning_rate
from dew.training.state import TrainState
from dew.tree import named_leaves, path_name
from dew_keras.names import unknown_name
from dew_keras.transformations import KerasState, keras_transformation, rate_source, rate_value

AUTO_PRETRAINED_RATE = 2e-5
HIGH_PRETRAINED_RATE = 1e-3
OPTIMIZER_NAMES = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lion", "muon", "nadam", "rmsprop"),
    *("schedulefreeadamw", "sgd"),
)
Schedule = keras.optimizers.schedules.LearningRateSchedule
# The array that was last shown as the iterations of a Keras object. An assignment puts another one in its place.
_shown: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


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
        given: The object that `compile` was given; the same one keeps its state.
        parts: The Keras objects that have rates and moments, in the order of their `KerasState`s.
        accumulation: Batches per update that the Keras object asks for; 1 when it does not.
    """

    public: Any
    build: Callable[[StackView], Optimizer]
    given: Any = None
    parts: tuple[Any, ...] = ()
    accumulation: int = 1
    _seen_rates: dict[int, Any] = dataclasses.field(default_factory=dict, repr=False)
    _schedules: dict[int, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def averages(self) -> bool:
        """Whether a moving average of the weights is kept, which they become when a fit ends."""
        return any(part.use_ema for part in self.parts)

    def changed_rates(self) -> dict[int, float]:
        """Return the learning rates that were assigned since the last call, by the number of the part.

        A Keras rate is a variable whose array is replaced by an assignment, so comparing identities costs no
        read of a device.
        """
        if isinstance(self.public, OptaxHandle):
            rate, self.public.assigned_rate = self.public.assigned_rate, None
            return {} if rate is None else {0: rate}
        changed = {}
        for number, part in enumerate(self.parts):
            source = rate_source(part)
            if isinstance(source, Schedule):
                _check_schedule(source, self._schedules.setdefault(number, source))
                continue
            # A callable is asked at every step, as Keras does.
            seen = float(source()) if callable(source) else source.value
            last = self._seen_rates.get(number)
            if seen is last or (callable(source) and seen == last):
                continue
            self._seen_rates[number] = seen
            changed[number] = float(seen)
        return changed

    def take_rates(self, rates: Sequence[float]) -> None:
        """Show rates that the training state has already, without passing them on as assignments.

        Args:
            rates: One per part; of any other number none is shown.
        """
        if len(rates) != len(self.parts):
            return
        for part, rate in zip(self.parts, rates, strict=True):
            if not callable(rate_source(part)):  # neither a schedule nor a function
                part.learning_rate = rate
        self.changed_rates()

    def with_assigned(self, state: TrainState) -> TrainState:
        """Bring learning rates and counts of updates that were assigned to the optimizer into a training state.

        Args:
            state: The state.
        """
        return self._with_counts(self._with_rates(state))

    def _with_rates(self, state: TrainState) -> TrainState:
        changed = self.changed_rates()
        if not changed:
            return state
        if isinstance(self.public, OptaxHandle):
            return state.with_learning_rate(changed[0])
        parts = keras_states(state.opt_state)
        for number, rate in changed.items():
            parts[number] = assign_learning_rate(parts[number], rate)
        return state.replace(opt_state=with_keras_states(state.opt_state, parts))

    def finished(self, state: TrainState) -> TrainState:
        """Make the weights their moving average, where one is kept and an update was made.

        Args:
            state: The state when a fit ends; the result shares no memory with its moments.
        """
        if not self.averages:
            return state
        means: dict[str, Any] = {}
        for part in keras_states(state.opt_state):
            # Before the first update the average is still zeros.
            if "average" in part.slots and int(part.count):
                means.update(named_leaves(part.slots["average"]))
        return state.replace(variables={**state.variables, "params": _replaced(state.params, means)})

    def show(self, state: TrainState | None, *, updates: Any = 0, open_batches: Any = 0) -> None:
        """Show how far training is as the optimizer's `iterations`, without waiting for the device.

        What the user assigned since is left: the next step begins with it.

        Args:
            state: The training state, or None before there is one.
            updates: Updates applied, where there is no state.
            open_batches: Batches since, where there is no state.
        """
        counts: list[Any] = [updates] * len(self.parts)
        if state is not None:
            if state.updates.is_deleted() or isinstance(jnp.zeros(()), jax.core.Tracer):
                return  # a step that failed consumed it, or a step of the user's own asks while it is traced
            updates, open_batches = state.updates, state.microstep
            counts = [part.count for part in keras_states(state.opt_state)]
        if isinstance(self.public, OptaxHandle):
            self.public.iterations = int(updates)
            return
        shown = {id(self.public): updates} | {id(o): count for o, count in zip(self.parts, counts, strict=True)}
        for optimizer in self._counting:
            if not _is_count_assigned(optimizer):
                # Where Keras accumulates gradients it counts batches, and divides where it is asked.
                window, count = optimizer.gradient_accumulation_steps, shown[id(optimizer)]
                optimizer._iterations.assign(_own(count if not window else count * window + open_batches))
                _shown[optimizer] = optimizer._iterations.value

    @functools.cached_property
    def _counting(self) -> list[Any]:
        """The Keras objects that count updates."""
        objects = {id(o): o for o in (self.public, *self.parts)}.values()
        return [o for o in objects if not isinstance(o, keras.optimizers.LossScaleOptimizer | OptaxHandle)]

    def _with_counts(self, state: TrainState) -> TrainState:
        assigned = {
            id(o): int(o._iterations.value) // (o.gradient_accumulation_steps or 1)
            for o in self._counting
            if _is_count_assigned(o)
        }
        if not assigned:
            return state
        for optimizer in self._counting:
            _shown[optimizer] = optimizer._iterations.value
        states = keras_states(state.opt_state)
        for number, part in enumerate(self.parts):
            if id(part) in assigned:
                count = jnp.full_like(states[number].count, assigned[id(part)])
                states[number] = states[number]._replace(count=count)
        updates = assigned.get(id(self.public), next(iter(assigned.values())) if len(self.parts) == 1 else None)
        if updates is not None:
            state = state.replace(updates=jnp.full_like(state.updates, updates))
        return state.replace(opt_state=with_keras_states(state.opt_state, states))


def _is_count_assigned(optimizer: Any) -> bool:
    """Say whether somebody assigned `iterations` since they were shown; comparing identities reads no device."""
    value = optimizer._iterations.value
    if optimizer not in _shown:
        _shown[optimizer] = None if int(value) else value
    return _shown[optimizer] is not value


def _own(count: Any) -> Any:
    # Copied, as the next step consumes the state, where the caller may have set a mesh; then on one device.
    return jnp.copy(count).addressable_data(0) if isinstance(count, jax.Array) else count


def keras_states(opt_state: Any) -> list[KerasState]:
    """List the states of Keras optimizers in an optimizer state, in the order of its parts.

    Args:
        opt_state: State of an optimizer.
    """
    return [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=_is_keras_state) if _is_keras_state(leaf)]


def with_keras_states(opt_state: Any, states: list[KerasState]) -> Any:
    """Replace the states of Keras optimizers in an optimizer state.

    Args:
        opt_state: State of an optimizer.
        states: In the order of `keras_states`.
    """
    fresh = iter(states)
    return jax.tree.map(lambda node: next(fresh) if _is_keras_state(node) else node, opt_state, is_leaf=_is_keras_state)


def resolve_optimizer(
    optimizer: Any, *, is_language_model: bool, is_pretrained: bool, scales_loss: bool = False
) -> CompiledOptimizer:
    """Turn what `compile` was given into an optimizer for a mesh.

    Args:
        optimizer: A Keras name, config or object, an optax transformation, or "auto": AdamW at 2e-5 for
            pretrained language models, AdamW for others, and Keras' default rmsprop for any other module.
        is_language_model: Whether the module is a language model.
        is_pretrained: Whether its weights come from a checkpoint.
        scales_loss: Whether to scale the loss dynamically, as Keras does under "mixed_float16".

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
        return _compiled_keras(optimizer, scales_loss=scales_loss)
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        scaled = dynamic_loss_scale(optimizer) if scales_loss else optimizer
        return CompiledOptimizer(OptaxHandle(optimizer), lambda view: scaled, given=optimizer)
    raise TypeError(
        "optimizer must be a Keras optimizer (name, config or object) or an optax transformation. "
        f"Received: optimizer={optimizer!r} of type {type(optimizer).__name__}"
    )


def high_rate(compiled: CompiledOptimizer) -> float | None:
    """Return the first learning rate when it is high for pretrained weights, else None.

    Args:
        compiled: The optimizer; an optax transformation shows its rate too late to be judged here.
    """
    rates = [rate_source(part) for part in compiled.parts]
    values = [float(rate(0)) if isinstance(rate, Schedule) else rate_value(rate) for rate in rates]
    value = max(values, default=0.0)
    return value if value >= HIGH_PRETRAINED_RATE else None


def _compiled_keras(optimizer: Any, *, scales_loss: bool) -> CompiledOptimizer:
    for kind in (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer):
        if isinstance(optimizer, kind) and type(optimizer) is not kind:
            raise ValueError(
                f"A subclass of keras.optimizers.{kind.__name__} may change how other optimizers are run, which is "
                f"not available. Use {kind.__name__} itself. Received: optimizer={optimizer!r}"
            )
    public = optimizer
    if scales_loss and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        public = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    inner = public.inner_optimizer if isinstance(public, keras.optimizers.LossScaleOptimizer) else public
    is_multi = isinstance(inner, keras.optimizers.MultiOptimizer)
    parts = tuple(inner.optimizers) if is_multi else (inner,)
    for part in parts:
        _check_part(part)
    if is_multi and not hasattr(inner._optimizer_map, "default_optimizer"):
        raise ValueError(
            "keras.optimizers.MultiOptimizer must be given a keras.optimizers.OptimizerMap here: a function makes its "
            f"optimizers when it first sees variables. Received: {inner._optimizer_map!r}"
        )
    windows = {part.gradient_accumulation_steps or 1 for part in parts}
    if len(windows) > 1:
        raise ValueError(
            "The optimizers of a MultiOptimizer must have the same gradient_accumulation_steps. "
            f"Received: {sorted(windows)}"
        )
    window = windows.pop()

    def build(view: StackView) -> Optimizer:
        made: Any = _multi(inner, parts, view) if is_multi else keras_transformation(inner, view)
        if public is not inner:
            return dynamic_loss_scale(
                made, initial_scale=public.initial_scale, growth_batches=public.dynamic_growth_steps, window=window
            )
        factor = inner.loss_scale_factor
        return made if factor is None else static_loss_scale(made, factor)

    compiled = CompiledOptimizer(public, build, given=optimizer, parts=parts, accumulation=window)
    compiled._schedules = {number: rate_source(part) for number, part in enumerate(parts)}
    return compiled


def _check_schedule(now: Any, compiled: Any) -> None:
    if now is not compiled:
        raise ValueError(
            "A learning-rate schedule that is assigned to the optimizer takes effect when the model is compiled again "
            f"with the same optimizer, which keeps its state. Received: learning_rate={now!r}"
        )


def _check_part(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer | keras.optimizers.MultiOptimizer):
        raise ValueError(
            f"keras.optimizers.{type(optimizer).__name__} cannot be inside another optimizer. "
            f"Received: optimizer={optimizer!r}"
        )
    if getattr(optimizer, "_exclude_from_weight_decay", None):
        raise ValueError(
            "exclude_from_weight_decay(var_list=...) names Keras variables, which this model does not have. Use "
            "var_names=[...] with parts of parameter paths, such as 'norm/scale'."
        )


def _multi(optimizer: Any, parts: tuple[Any, ...], view: StackView) -> Any:
    """Give every weight to the optimizer that Keras' OptimizerMap finds for its path."""
    made = {f"{number:03d}": keras_transformation(part, view) for number, part in enumerate(parts)}

    def label(path: Any, _: Any) -> str:
        layers = view.logical_paths(path_name(path))
        found = [next(n for n, p in enumerate(parts) if p is optimizer._optimizer_map[layer]) for layer in layers]
        if len(set(found)) > 1:
            raise ValueError(
                f"{view.title(path_name(path))} is stored as one bank of layers, and the OptimizerMap gives its layers "
                f"different optimizers. Build the module with scan_layers=False. Received: {list(layers)}"
            )
        return f"{found[0]:03d}"

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(label, params)

    return _partitioned(made, labels)


def _partitioned(made: Mapping[str, Any], labels: Callable[[Any], Any]) -> Any:
    plain = {name: optax.GradientTransformation(part.init, part.update) for name, part in made.items()}
    joined = optax.partition(plain, labels)
    if not any(part.after_batch for part in made.values()):
        return joined

    def after_batch(params: Any, state: Any) -> tuple[Any, Any]:
        names, states, means = labels(params), keras_states(state), {}
        for number, (name, part) in enumerate(sorted(made.items())):
            if part.after_batch is None:
                continue
            own = jax.tree.map(
                lambda label, leaf, name=name: leaf if label == name else optax.MaskedNode(), names, params
            )
            own, states[number] = part.after_batch(own, states[number])
            means.update(named_leaves(own))
        return _replaced(params, means, copies=False), with_keras_states(state, states)

    return StepTransformation(joined.init, joined.update, after_batch=after_batch)


def _is_keras_state(node: Any) -> bool:
    return isinstance(node, KerasState)


def _replaced(params: Any, values: Mapping[str, Any], *, copies: bool = True) -> Any:
    def replace(path: Any, leaf: Any) -> Any:
        fresh = values.get(path_name(path))
        return leaf if fresh is None else jnp.copy(fresh) if copies else fresh

    return jax.tree_util.tree_map_with_path(replace, params)

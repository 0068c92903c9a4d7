"""Named optimizers as optax transformations whose learning rate is an array in the state.

Entry points: `make_optimizer`, `read_learning_rate`, `assign_learning_rate`, `StepTransformation`. The rate can be
assigned between steps without compiling again; any other optax transformation works too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dew.tree import closest, map_named, matches, named_leaves

Schedule = Callable[[jax.Array], jax.Array]


class StepTransformation(NamedTuple):
    """An optax transformation that takes part in more of a training step than the update.

    Attributes:
        init: As in optax.
        update: As in optax.
        loss_scale: Reads from the state what the loss is multiplied by before it is differentiated; gradients are
            divided by it in float32. None scales nothing. Reported losses are never scaled.
        reject: Maps the state at an update whose loss or gradient is not finite; None keeps the state.
        after_batch: Maps (parameters, state) after a batch that leaves its window open; None changes nothing.
        averages_batches: Whether a window's gradient is the mean of its batches' mean gradients, rather than the
            gradient of the pooled total over the pooled mass.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    loss_scale: Callable[[Any], jax.Array] | None = None
    reject: Callable[[Any], Any] | None = None
    after_batch: Callable[[Any, Any], tuple[Any, Any]] | None = None
    averages_batches: bool = False


Optimizer = optax.GradientTransformation | StepTransformation


def _adam(learning_rate: Any, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8):
    return [optax.scale_by_adam(b1=b1, b2=b2, eps=eps)]


def _sgd(learning_rate: Any, *, momentum: float | None = None, nesterov: bool = False):
    if momentum is None:
        if nesterov:
            raise ValueError("sgd: nesterov=True needs a momentum. Received: momentum=None.")
        return []
    return [optax.trace(decay=momentum, nesterov=nesterov)]


# name -> (directions before decay and rate, default learning rate, default weight decay)
OPTIMIZERS: dict[str, tuple[Callable[..., list[Any]], float, float]] = {
    "adam": (_adam, 1e-3, 0.0),
    "adamw": (_adam, 1e-3, 0.01),
    "sgd": (_sgd, 1e-2, 0.0),
}


def make_optimizer(
    name: str,
    learning_rate: float | Schedule | None = None,
    *,
    weight_decay: float | None = None,
    decay_exclude: Sequence[str] = (),
    clip_norm: float | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """Build an optimizer by name.

    Args:
        name: "adam", "adamw" or "sgd", in any case.
        learning_rate: A number, or a schedule called with the count of updates. None takes
            1e-3 (adam, adamw) or 1e-2 (sgd).
        weight_decay: Decoupled decay per unit of learning rate; None takes 0.01 for adamw and
            0 for the others.
        decay_exclude: Globs over parameter paths that are not decayed, such as
            `*norm/scale`. Each must match a parameter.
        clip_norm: Scale the gradient down to this global norm; None leaves it.
        **options: adam and adamw: `b1`, `b2`, `eps`; sgd: `momentum`, `nesterov`.

    Returns:
        The transformation; a constant rate lives in its state, see `assign_learning_rate`.

    Raises:
        ValueError: If the name is unknown or a number is out of range.
        TypeError: If an option does not belong to the optimizer.
    """
    directions, default_rate, default_decay = _named(name)
    decay = default_decay if weight_decay is None else weight_decay
    rate = default_rate if learning_rate is None else learning_rate
    _check_numbers(rate, decay, clip_norm)
    directions(rate, **options)  # refuses unknown options now, not at the first step

    def build(learning_rate: Any) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(clip_norm)] if clip_norm is not None else []
        parts += directions(learning_rate, **options)
        if decay:
            mask = _decay_mask(tuple(decay_exclude)) if decay_exclude else None
            parts.append(optax.add_decayed_weights(decay, mask=mask))
        return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))

    # float32 even for bfloat16 parameters, where a rate would round to three digits.
    return optax.inject_hyperparams(build, hyperparam_dtype=jnp.float32)(rate)


def as_optimizer(optimizer: str | Optimizer) -> Optimizer:
    """Accept a name or an optax transformation.

    Args:
        optimizer: What the caller gave.

    Raises:
        ValueError: If a name is unknown.
        TypeError: If it is neither.
    """
    if isinstance(optimizer, str):
        return make_optimizer(optimizer)
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return optimizer
    raise TypeError(
        "optimizer must be a name or an optax transformation with init and update. "
        f"Received: optimizer={optimizer!r} of type {type(optimizer).__name__}."
    )


def as_step_transformation(optimizer: Optimizer) -> StepTransformation:
    """Give an optax transformation the parts of a step it does not have.

    Args:
        optimizer: An optax transformation, or one with those parts already.
    """
    if isinstance(optimizer, StepTransformation):
        return optimizer
    return StepTransformation(optimizer.init, optimizer.update)


def read_learning_rate(opt_state: Any) -> jax.Array | None:
    """Find the learning rate that the last update used or the next one will use.

    Args:
        opt_state: State of an optimizer.

    Returns:
        A float32 scalar, or None when the optimizer keeps no rate in its state.
    """
    for node in _hyperparameter_states(opt_state):
        if "learning_rate" in node.hyperparams:
            return node.hyperparams["learning_rate"]
    return None


def assign_learning_rate(opt_state: Any, value: float) -> Any:
    """Set the learning rate that the next update uses.

    Args:
        opt_state: State of an optimizer.
        value: The new rate.

    Returns:
        A copy of the state; the arrays other than the rate are shared.

    Raises:
        ValueError: If the optimizer keeps no rate in its state.
        TypeError: If the rate follows a schedule, which would overwrite the value.
    """
    rate = read_learning_rate(opt_state)
    if rate is None:
        raise ValueError(
            "This optimizer keeps no learning rate in its state, so none can be assigned. Build it "
            "with dew.training.make_optimizer or optax.inject_hyperparams."
        )

    def replace(node: Any) -> Any:
        if not _has_hyperparameters(node) or "learning_rate" not in node.hyperparams:
            return node
        if "learning_rate" in getattr(node, "hyperparams_states", {}):
            raise TypeError(
                "The learning rate follows a schedule, which sets it at every update. "
                f"Received: learning_rate={value}. Build the optimizer with a number to assign it."
            )
        old = node.hyperparams["learning_rate"]
        new = jax.device_put(jnp.asarray(value, old.dtype), old.sharding)
        return node._replace(hyperparams={**node.hyperparams, "learning_rate": new})

    return jax.tree.map(replace, opt_state, is_leaf=_has_hyperparameters)


def _named(name: str) -> tuple[Callable[..., list[Any]], float, float]:
    known = OPTIMIZERS.get(name.lower())
    if known is None:
        near = closest(name.lower(), OPTIMIZERS)
        hint = f"Did you mean {near!r}? " if near else ""
        raise ValueError(
            f"Unknown optimizer name. {hint}Known names: {', '.join(OPTIMIZERS)}; any optax "
            f"transformation works as an object. Received: optimizer={name!r}."
        )
    return known


def _check_numbers(rate: Any, decay: float, clip_norm: float | None) -> None:
    if not callable(rate) and not rate >= 0:
        raise ValueError(f"learning_rate must be >= 0. Received: learning_rate={rate}.")
    if decay < 0:
        raise ValueError(f"weight_decay must be >= 0. Received: weight_decay={decay}.")
    if clip_norm is not None and clip_norm <= 0:
        raise ValueError(f"clip_norm must be > 0 or None. Received: clip_norm={clip_norm}.")


def _decay_mask(patterns: tuple[str, ...]) -> Callable[[Any], Any]:
    def mask(params: Any) -> Any:
        names = list(named_leaves(params))
        for pattern in patterns:
            if not any(matches(name, (pattern,)) for name in names):
                near = closest(pattern, names)
                hint = f" The nearest parameter is {near!r}." if near else ""
                raise ValueError(
                    f"decay_exclude pattern {pattern!r} matches no parameter.{hint} "
                    "Patterns are globs over the whole path, such as '*norm/scale'."
                )
        return map_named(lambda name, _: not matches(name, patterns), params)

    return mask


def _has_hyperparameters(node: Any) -> bool:
    return isinstance(getattr(node, "hyperparams", None), dict)


def _hyperparameter_states(opt_state: Any) -> list[Any]:
    leaves = jax.tree.leaves(opt_state, is_leaf=_has_hyperparameters)
    return [leaf for leaf in leaves if _has_hyperparameters(leaf)]

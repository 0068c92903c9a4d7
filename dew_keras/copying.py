"""Copies of a model that train on by themselves: `copied`, which `copy.deepcopy` calls."""

from __future__ import annotations

import copy
from typing import Any

from dew_keras.callbacks import LossTracker
from dew_keras.engine import Engine

_MADE_ANEW = ("_engine", "_loss_tracker", "history", "tokenizer")


def copied(model: Any, memo: dict[int, Any]) -> Any:
    """Copy a model with its weights, its optimizer and how it is compiled.

    Args:
        model: A model; no verb of it may be running.
        memo: As `copy.deepcopy` hands it on.

    Returns:
        A model that trains on without changing the first.

    Raises:
        RuntimeError: If a verb of the model is running, or `close` freed its weights.
    """
    engine = model._engine
    engine.check_idle("deepcopy")
    other = object.__new__(type(model))
    memo[id(model)] = other
    other.history, other.tokenizer = model.history, model.tokenizer
    fresh = Engine(
        engine.given_module, preset=engine.preset, variables=engine.given_variables, seed=engine.seed, model=other
    )
    other._engine, other._loss_tracker = fresh, LossTracker(fresh)
    for name, value in vars(model).items():
        if name not in _MADE_ANEW:
            vars(other)[name] = copy.deepcopy(value, memo)
    fresh.begin_with(engine)
    if engine.compiled is not None:
        other.compile(**_copied_arguments(engine.compiled))
    fresh.go_on_with(engine)
    return other


def _copied_arguments(compiled: Any) -> dict[str, Any]:
    """Copy the objects that training changes: the optimizer and metrics."""
    arguments = dict(compiled.arguments)
    if compiled.optimizer.parts:
        arguments["optimizer"] = copy.deepcopy(compiled.optimizer.given)
    for name in ("metrics", "weighted_metrics"):
        arguments[name] = copy.deepcopy(arguments[name])
    return arguments

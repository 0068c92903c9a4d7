"""Keeps balance biases of routers out of the optimizer and moves them by a rate of their own.

Entry point: `with_router_biases`. Their gradient is the excess load of each expert, so a window adds it up like any
gradient, each token once, and an update takes its sign (https://arxiv.org/abs/2408.15664, algorithm 1).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from dew.nn.router import is_balance_bias
from dew.training.optimizer import Optimizer, as_step_transformation
from dew.tree import map_named


def with_router_biases(optimizer: Optimizer, module: Any) -> Optimizer:
    """Wrap an optimizer where a module's routers have balance biases; its state stays the same.

    Args:
        optimizer: What updates everything else. It sees zeros for the gradients of biases, so that they have no part in
            a norm, and neither its moments nor its weight decay move them. Nor does freezing hold them: `bias_rate=0`
            does.
        module: The module under training; one without such routers leaves the optimizer as it is.

    Returns:
        The optimizer of the whole module.
    """
    experts = (*getattr(module, "expert_layers", ()), *getattr(module, "prediction_experts", ()))
    if not any(spec.router.balance_bias for spec in experts):
        return optimizer
    rate, inner = module.router_training.bias_rate, as_step_transformation(optimizer)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        loads = gradients
        gradients = map_named(lambda path, leaf: jnp.zeros_like(leaf) if is_balance_bias(path) else leaf, gradients)
        updates, state = inner.update(gradients, state, params, **extra)
        return map_named(lambda path, leaf, load: _step(path, leaf, load, rate), updates, loads), state

    return inner._replace(update=update)


def _step(path: str, update: Any, load: Any, rate: float) -> Any:
    return -rate * jnp.sign(load).astype(update.dtype) if is_balance_bias(path) else update

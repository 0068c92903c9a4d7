"""What routers add to a loss, and what they report.

Entry points: `routing_metrics`, and `dew.nn.router.router_loss`. Every token counts with the weight of its loss, so
that both belong to the mass that the loss is divided by, whatever rows, devices and accumulated batches there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.nn.moe import ExpertsSpec
from dew.nn.router import Routing
from dew.objectives.base import Ratio

CROSS_ENTROPY = "cross_entropy"
"""Statistic of the loss without what routers add to it."""
EXPERT_LOAD = "expert_load"
"""Statistic of arrays [layers, experts]: slots given to each expert over an even share of them."""
ROUTING_METRICS = ("router_balance", "router_z", "router_entropy", "dropped_slots", "expert_load_max")
"""What a report says of the routers: the two losses before their weights, the entropy of the shares over its greatest
value, slots left out by a capacity over all slots, and the load of the busiest expert over an even share."""


def routing_metrics(routing: Sequence[Routing], experts: Sequence[ExpertsSpec]) -> dict[str, Ratio]:
    """Report the statistics of all layers.

    Args:
        routing: Statistics of each layer with experts.
        experts: Their specs.

    Returns:
        Ratios by name, pooled over layers; `expert_load` holds arrays [layers, experts].
    """
    routing = jax.lax.stop_gradient(tuple(routing))
    tokens = sum(each.tokens for each in routing)
    pooled: dict[str, Any] = {
        f"router_{name}": Ratio(sum(getattr(each, name) for each in routing), tokens)
        for name in ("balance", "z", "entropy")
    }
    slots = sum(each.tokens * spec.router.top_k for each, spec in zip(routing, experts, strict=True))
    pooled["dropped_slots"] = Ratio(sum(each.dropped for each in routing), slots)
    most = max(spec.num_experts for spec in experts)
    loads, even = [], []
    for each, spec in zip(routing, experts, strict=True):
        loads.append(jnp.pad(each.load, (0, most - spec.num_experts)))
        even.append(jnp.full(most, each.tokens * spec.router.top_k / spec.num_experts))
    pooled[EXPERT_LOAD] = Ratio(jnp.stack(loads), jnp.stack(even))
    return pooled


def busiest(load: Ratio) -> float:
    """Find the busiest expert of any layer.

    Args:
        load: The pooled `expert_load`, on the host.

    Returns:
        Its load over an even share; 0.0 where nothing was counted.
    """
    total, even = np.asarray(load.total, np.float64), np.asarray(load.mass, np.float64)
    return float(np.max(np.divide(total, even, out=np.zeros_like(total), where=even > 0)))

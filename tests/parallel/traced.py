"""What a traced program sends, in its own dtypes: compiling for CPU widens some."""

import collections
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

KINDS = {
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
}


def traced_bytes(traced: Any, times: int = 1) -> collections.Counter[str]:
    """Add up the results of collectives on one device, by their kind.

    Args:
        traced: What `jax.make_jaxpr` gave, or a program inside it.
        times: How often it runs.
    """
    found: collections.Counter[str] = collections.Counter()
    for step in getattr(traced, "jaxpr", traced).eqns:
        name = step.primitive.name
        if name in KINDS:
            found[KINDS[name]] += times * sum(out.aval.size * out.aval.dtype.itemsize for out in step.outvars)
        repeats = times * (step.params["length"] if name == "scan" else 1)
        for inner in jax.tree.leaves(step.params, is_leaf=_is_program):
            if _is_program(inner):
                found += traced_bytes(inner, repeats)
    return found


def _is_program(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)

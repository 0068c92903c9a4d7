"""Fresh variables on a mesh, each device making its own part.

Entry point: `initialise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from dew.training.placing import plain

# Below this many elements a program that draws weights takes longer to optimise than to run unoptimised.
SMALL = 10_000_000


def initialise(init: Callable[[jax.Array], Any], key: jax.Array, abstract: Any, shardings: Any, mesh: Mesh) -> Any:
    """Draw the variables of a module.

    Args:
        init: A function of a random key; it is not traced again where `abstract` came from tracing the same function.
        key: The random key.
        abstract: Shapes of the variables, boxed as `init` gives them.
        shardings: A NamedSharding per variable, unboxed.
        mesh: The mesh.

    Returns:
        The variables, unboxed.
    """
    places = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(shardings))
    elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))
    is_quick = elements < SMALL and mesh.devices.flat[0].platform == "cpu"
    options: Any = {"xla_backend_optimization_level": 0} if is_quick else None
    return plain(jax.jit(init, out_shardings=places, compiler_options=options)(key))

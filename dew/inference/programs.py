"""The compiled programs of generation, kept and counted.

Entry points: `compiled_program` compiles a function for the arguments at hand, once per key, shapes and placements;
`compilation_counts` says how often that happened. Weights are arguments of a program, never constants in it.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding

KEPT_PROGRAMS = 64
"""How many programs stay compiled; the one unused for longest goes first."""

_programs: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
_counts: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()


def compilation_counts() -> dict[str, int]:
    """Count the compilations so far, by the name of the program (`prefill`, `decode`)."""
    return dict(_counts)


def forget_programs() -> None:
    """Drop every kept program and set the counts back to zero."""
    with _lock:
        _programs.clear()
        _counts.clear()


@contextlib.contextmanager
def tracing_context(mesh: Mesh, rules: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Put a mesh and a table of logical rules in force, as tracing a model needs them."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(tuple(rules)):
        yield


def compiled_program(
    name: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    key: tuple[Hashable, ...],
    mesh: Mesh,
    rules: tuple[tuple[str, Any], ...],
    out_shardings: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """Compile `function` for `arguments`, or return the program already compiled for the like of them.

    Args:
        name: What the compilation is counted under.
        function: Pure function of the arguments. Only the first function under a key is ever traced.
        arguments: Placed arrays in pytrees; their shapes, dtypes and placements are part of the key.
        key: Whatever else the trace of `function` depends on.
        mesh: Mesh to trace under.
        rules: Logical rules to trace under.
        out_shardings: Placement of the results, as `jax.jit` takes it.
        donate: Numbers of the arguments whose memory the program may reuse.

    Returns:
        The program; call it with arguments like those given.
    """
    full_key = (name, key, mesh, rules, _signature(arguments))
    with _lock:
        if full_key in _programs:
            _programs.move_to_end(full_key)
            return _programs[full_key]
    with tracing_context(mesh, rules):
        jitted = jax.jit(function, out_shardings=out_shardings, donate_argnums=donate)
        program = jitted.lower(*arguments).compile()
    with _lock:
        _programs[full_key] = program
        _counts[name] += 1
        while len(_programs) > KEPT_PROGRAMS:
            _programs.popitem(last=False)
    return program


def _signature(arguments: Any) -> Hashable:
    """Everything about placed arguments that a compiled program is tied to."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, leaf.dtype, _placement(leaf.sharding)) for leaf in leaves)


def _placement(sharding: Any) -> Hashable:
    """A sharding without spellings of one placement that compare unequal."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = list(sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return sharding.mesh, tuple(spec), sharding.memory_kind

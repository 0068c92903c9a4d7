"""How a Flax module wants to be called: its inputs, its training flag, its random keys and its collections.

Entry points: `ModuleCall`, `cast_floats`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError

TRAINING_FLAGS = ("training", "train")
ADDED_LOSSES = "losses"


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """Calls one Flax module the way its signature asks.

    A module whose call takes `training`, `train` or `deterministic` is told. A dict of inputs is passed by keyword
    when the call has those parameters, a tuple or list by position when it has as many; anything else is passed as
    it is. What a module sows into "losses" is added to the loss.

    Under a dtype policy, floating parameters and inputs are cast to the compute dtype at the call; gradients come
    back in the dtype of the parameters. Batch statistics are neither cast nor kept narrower than the module does.

    Attributes:
        module: The module.
        compute_dtype: What floating parameters and inputs are cast to; None leaves both.
        variable_dtype: What floating parameters are kept in; None leaves it to the module.
    """

    module: Any
    compute_dtype: str | None = None
    variable_dtype: str | None = None

    def flags(self, train: bool) -> dict[str, bool]:
        """Return the keywords that tell the module whether it trains.

        Args:
            train: Whether it does.
        """
        flags = {name: train for name in TRAINING_FLAGS if name in self._parameters}
        if "deterministic" in self._parameters:
            flags["deterministic"] = not train
        return flags

    @property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        parameters = dict(inspect.signature(type(self.module).__call__).parameters)
        parameters.pop(next(iter(parameters)))
        return parameters

    def arguments(self, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Split inputs into positional and keyword arguments.

        Args:
            x: What `fit` was given as x.
        """
        names = [
            name
            for name, parameter in self._parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and name not in (*TRAINING_FLAGS, "deterministic")
        ]
        if isinstance(x, Mapping) and set(x) <= set(self._parameters):
            return (), dict(x)
        if isinstance(x, tuple | list) and 1 <= len(x) <= len(names):
            return tuple(x), {}
        return (x,), {}

    def init(self, key: jax.Array, x: Any) -> tuple[dict[str, Any], Any]:
        """Make fresh variables; traceable.

        Args:
            key: Random key.
            x: Inputs of at least one row.

        Returns:
            The module's collections, without what it only sows; its outputs.
        """
        positional, keywords = self.arguments(x)
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        outputs, variables = self.module.init_with_output(rngs, *positional, **keywords, **self.flags(False))
        kept = {name: tree for name, tree in variables.items() if name not in (ADDED_LOSSES, "intermediates")}
        kept = {"params": {}, **kept}
        return {**kept, "params": cast_floats(kept["params"], self.variable_dtype)}, outputs

    def apply(
        self, variables: Mapping[str, Any], x: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, dict[str, Any], Any]:
        """Call the module; traceable.

        Args:
            variables: Its collections.
            x: Inputs, rows first.
            key: Random key for dropout and the like; None outside training.
            train: Whether it trains.

        Returns:
            The outputs, the collections that training replaces, and the sum of the losses it added.
        """
        positional, keywords = self.arguments(cast_floats(x, self.compute_dtype))
        rest = [name for name in variables if name != "params"]
        # A stream that is not named here falls back to "params" in Flax.
        rngs = {} if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
        kept = variables
        variables = {**variables, "params": cast_floats(variables.get("params", {}), self.compute_dtype)}
        with _naming_inputs(self.module, x):
            y_pred, updated = self.module.apply(
                variables,
                *positional,
                **keywords,
                **self.flags(train),
                rngs=rngs,
                mutable=[*(rest if train else ()), ADDED_LOSSES],
            )
        updated = dict(updated)
        for name in set(updated) & set(kept) if self.compute_dtype else ():
            # Statistics computed from narrow activations stay in the dtype they are kept in.
            updated[name] = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), updated[name], kept[name])
        added = sum(
            (jnp.sum(jnp.asarray(leaf, jnp.float32)) for leaf in jax.tree.leaves(updated.pop(ADDED_LOSSES, {}))),
            jnp.zeros((), jnp.float32),
        )
        return y_pred, updated, added

    def output_shapes(self, variables: Any, x: Any) -> Any:
        """Compute the shapes of the outputs without running the module.

        Args:
            variables: Shapes of its collections.
            x: Inputs of one row.

        Returns:
            A tree of shapes in the structure of the outputs.
        """

        def run(variables: Any, x: Any) -> Any:
            return self.apply(variables, x, key=jax.random.key(0), train=False)[0]

        return jax.eval_shape(run, variables, jax.tree.map(jnp.asarray, x))


@contextlib.contextmanager
def _naming_inputs(module: Any, x: Any) -> Iterator[None]:
    """Say which inputs a module was given when it refuses them."""
    try:
        yield
    except ScopeParamShapeError as error:
        found = re.search(r'parameter "(.*?)" in "/(.*?)", .*shape (\(.*?\)), .*shape (\(.*?\))', str(error))
        if found is None:
            raise
        parameter, layer, needed, held = found.groups()
        raise ValueError(
            f"Inputs of shape {_shapes(x)} do not fit {type(module).__name__}: {layer or 'it'} holds the parameter "
            f"{parameter!r} of shape {held}, and these inputs need {needed}. Give inputs of the shape that the model "
            "was built with."
        ) from error
    except (TypeError, ValueError) as error:
        error.add_note(f"{type(module).__name__} was called on inputs of shape {_shapes(x)}.")
        raise


def _shapes(x: Any) -> str:
    return str(jax.tree.map(lambda leaf: tuple(jnp.shape(leaf)), x))


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Cast the floating leaves of a tree; integers, booleans and random keys stay.

    Args:
        tree: Arrays.
        dtype: The dtype, or None to leave the tree as it is.
    """
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        return jnp.asarray(leaf, dtype) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf

    return jax.tree.map(cast, tree)

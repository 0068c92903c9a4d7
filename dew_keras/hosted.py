"""Optimizers whose formula is the user's own: Keras' pure `stateless_apply`, run on a mesh.

Entry points: `hosted_first`, `hosted_update`. A twin of the user's object is built on the weights, one variable per
layer, inside each trace: it holds traced values only and is gone with the trace, so the user's object stays unbuilt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras

from dew.placement.stacks import StackView
from dew.tree import path_name
from dew_keras.update_rules import Moment

# Slots of weights are named by the optimizer; this one holds the variables that belong to no weight.
SHARED = "shared_variables"
NUM_BASE_VARIABLES = 2  # iterations and learning rate, which every Keras optimizer makes first


class Twin:
    """A fresh copy of a Keras optimizer, built on the layers of a parameter tree.

    Args:
        optimizer: The user's object; it is read only.
        view: How the parameters store layers.
        params: The parameters, on whose values the copy is built.
        is_decayed: Says of a path whether weight decay acts on it.
    """

    def __init__(self, optimizer: Any, view: StackView, params: Any, is_decayed: Any) -> None:
        flat, self.structure = jax.tree_util.tree_flatten_with_path(view.unstack(params))
        self.paths = [path_name(path) for path, _ in flat]
        self.values = [leaf for _, leaf in flat]
        self.variables = [_variable(path, value) for path, value in zip(self.paths, self.values, strict=True)]
        self.optimizer = _copied(optimizer)
        self._slots: dict[str, dict[int, Any]] = {}
        self._record()
        self.optimizer._exclude_from_weight_decay_cache = {
            id(variable): is_decayed(path) for path, variable in zip(self.paths, self.variables, strict=True)
        }
        self.optimizer.build(self.variables)
        self._view = view

    def _record(self) -> None:
        """Note which variable belongs to which weight while the optimizer makes them."""
        make = self.optimizer.add_variable_from_reference
        index = {id(variable): number for number, variable in enumerate(self.variables)}

        def recorded(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
            made = make(reference_variable, name=name, initializer=initializer)
            number = index.get(id(reference_variable))
            if number is not None:
                slot, base = str(name or "var"), str(name or "var")
                while number in self._slots.get(slot, {}):
                    slot = f"{base}_{sum(known.startswith(base) for known in self._slots)}"
                self._slots.setdefault(slot, {})[number] = made
            return made

        self.optimizer.add_variable_from_reference = recorded

    def slots(self, values: Mapping[int, Any]) -> dict[str, Any]:
        """Arrange values of the optimizer's variables as trees like the parameters, and the shared ones by number.

        Args:
            values: Value by id of the variable.
        """
        found: dict[str, Any] = {}
        for name, variables in self._slots.items():
            leaves = [
                values[id(variables[number])] if number in variables else self._placeholder(number)
                for number in range(len(self.values))
            ]
            found[name] = self.stacked(leaves)
        found[SHARED] = {str(number): values[id(variable)] for number, variable in enumerate(self._shared())}
        return found

    def _placeholder(self, number: int) -> Any:
        # Full size in a bank, whose other layers may keep the slot.
        value, (_, layer) = self.values[number], self._view.physical(self.paths[number])
        return jnp.zeros(() if layer is None else value.shape, value.dtype)

    def stacked(self, leaves: list[Any]) -> Any:
        """Put one leaf per layer back into the storage of the parameters.

        Args:
            leaves: In the order of the paths.
        """
        return self._view.stack(jax.tree.unflatten(self.structure, leaves))

    def optimizer_values(self, slots: Mapping[str, Any], now: Moment) -> list[Any]:
        """List the values of the optimizer's variables in its order.

        Args:
            slots: As `slots` arranges them.
            now: The count and the rate of this update.
        """
        own: dict[int, Any] = {}
        for name, variables in self._slots.items():
            leaves = jax.tree.leaves(self._view.unstack(slots[name]))
            own.update({id(variable): leaves[number] for number, variable in variables.items()})
        own.update({id(variable): slots[SHARED][str(number)] for number, variable in enumerate(self._shared())})
        iterations, rate, *rest = self.optimizer.variables
        base = [jnp.asarray(now.count - 1, iterations.dtype), jnp.asarray(now.rate, rate.dtype)]
        return base + [own[id(variable)] for variable in rest]

    def _shared(self) -> list[Any]:
        of_weights = {id(variable) for found in self._slots.values() for variable in found.values()}
        return [v for v in self.optimizer.variables[NUM_BASE_VARIABLES:] if id(v) not in of_weights]


def hosted_first(optimizer: Any, view: StackView, params: Any, is_decayed: Any) -> dict[str, Any]:
    """Make the slots that an optimizer keeps before its first update.

    Args:
        optimizer: The Keras object.
        view: How the parameters store layers.
        params: The parameters.
        is_decayed: Says of a path whether weight decay acts on it.

    Returns:
        Slot name to a tree like the parameters, and the variables that belong to no weight.
    """
    twin = Twin(optimizer, view, params, is_decayed)
    return twin.slots({id(variable): jnp.copy(variable.value) for variable in twin.optimizer.variables})


def hosted_update(
    optimizer: Any,
    view: StackView,
    gradients: Any,
    params: Any,
    slots: Mapping[str, Any],
    now: Moment,
    is_decayed: Any,
) -> tuple[Any, dict[str, Any]]:
    """Compute the change of every weight with the optimizer's own code.

    Args:
        optimizer: The Keras object.
        view: How the parameters store layers.
        gradients: Gradients, like the parameters.
        params: The parameters.
        slots: As `hosted_first` makes them.
        now: The count and the rate of this update.
        is_decayed: Says of a path whether weight decay acts on it.

    Returns:
        Changes like the parameters, and the new slots.
    """
    twin = Twin(optimizer, view, params, is_decayed)
    given = jax.tree.leaves(view.unstack(gradients))
    weights, kept = twin.optimizer.stateless_apply(twin.optimizer_values(slots, now), given, twin.values)
    fresh = twin.slots({id(v): value for v, value in zip(twin.optimizer.variables, kept, strict=True)})
    return jax.tree.map(jnp.subtract, twin.stacked(list(weights)), params), fresh


def _variable(path: str, value: Any) -> Any:
    variable = keras.Variable(value, dtype=str(value.dtype), name=path.rsplit("/", 1)[-1])
    variable._path = path  # what formulas that choose by name look at
    return variable


def _copied(optimizer: Any) -> Any:
    """Copy an optimizer without its variables; the moving average, the window and the loss scale stay outside."""
    twin = object.__new__(type(optimizer))
    keras.optimizers.Optimizer.__init__(
        twin,
        learning_rate=1.0,
        weight_decay=optimizer.weight_decay,
        clipnorm=optimizer.clipnorm,
        clipvalue=optimizer.clipvalue,
        global_clipnorm=optimizer.global_clipnorm,
        name=optimizer.name,
    )
    for name, value in vars(optimizer).items():
        if name in vars(twin) or (optimizer.built and _holds_variables(value)):
            continue
        # A list that build appends to must not be the user's.
        is_container = isinstance(value, list | dict | set)
        setattr(twin, name, _plain_container(value) if is_container else value)
    return twin


def _plain_container(value: Any) -> Any:
    kind = next(kind for kind in (list, dict, set) if isinstance(value, kind))
    return kind(value)


def _holds_variables(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else [value]
    return any(isinstance(item, keras.Variable) for item in items)

"""Weights kept on the devices as they lie there: what `EarlyStopping` holds until it restores the best ones.

Entry point: `WeightSnapshot`. Nothing is gathered unless somebody reads an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.placement.stacks import StackView
from dew.tree import named_leaves, nested
from dew_keras.layer_arrays import host_layers, layer_shapes


class WeightSnapshot(Sequence):
    """A copy of all weights on their devices that reads like the list of `get_weights`.

    Args:
        variables: The weights; they are copied, because the next step consumes them.
        view: How the module stores layers.
    """

    def __init__(self, variables: Any, view: StackView) -> None:
        self._variables = jax.tree.map(jnp.copy, variables)
        self._view = view
        self._host: list[np.ndarray] | None = None
        self._length = len(layer_shapes(variables, view))

    @property
    def variables(self) -> Any:
        """The copy, in the structure of the model's variables."""
        return self._variables

    @property
    def is_on_host(self) -> bool:
        """Whether somebody has read an item, so that all were copied to the host."""
        return self._host is not None

    def fits(self, variables: Any) -> bool:
        """Say whether the copy can take the place of other variables.

        Args:
            variables: The current ones.
        """
        mine, other = (jax.tree.map(jnp.shape, tree) for tree in (self._variables, variables))
        return mine == other

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if self._host is None:
            self._host = host_leaves(self._variables, self._view)
        return self._host[index]


def host_leaves(variables: Any, view: StackView) -> list[np.ndarray]:
    """Copy variables to the host, one array per layer and weight, sorted by path.

    Args:
        variables: Arrays on devices.
        view: How the module stores layers.
    """
    return list(named_leaves(nested(dict(host_layers(variables, view)))).values())

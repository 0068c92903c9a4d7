"""What `keras.callbacks.OrbaxCheckpoint` saves of a model, sharded as it lies on the mesh, and reading it back.

Entry points: `OrbaxVerbs`, which the weight verbs inherit, and `load_orbax_weights`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

# Not public; see `_obj_type`.
from keras.src.saving.keras_saveable import KerasSaveable
from orbax.checkpoint import v1 as ocp

from dew.placement.stacks import StackView
from dew.tree import named_leaves, nested
from dew_keras.engine import Engine

COLLECTIONS = ("trainable_variables", "non_trainable_variables")


def state_tree(variables: Any, opt_state: Any, view: StackView) -> dict[str, Any]:
    """Name all arrays as Keras' state tree does: per layer, whatever the storage.

    Args:
        variables: All collections.
        opt_state: State of the optimizer, or None.
        view: How the module stores layers.

    Returns:
        Device arrays under "trainable_variables", "non_trainable_variables" and "optimizer_variables".
    """
    logical = view.unstack(variables)
    return {
        "trainable_variables": logical["params"],
        "non_trainable_variables": {name: tree for name, tree in logical.items() if name != "params"},
        "optimizer_variables": {} if opt_state is None else nested(named_leaves(opt_state)),
    }


class OrbaxVerbs(KerasSaveable):
    """What `OrbaxCheckpoint` asks of a model."""

    _engine: Engine

    def get_state_tree(self, value_format: str = "backend_tensor") -> dict[str, Any]:
        """Name the weights and the optimizer's arrays as they lie on the devices.

        Args:
            value_format: "backend_tensor", or "numpy_array" for copies on the host.

        Raises:
            ValueError: If the format is neither.
        """
        if value_format not in ("backend_tensor", "numpy_array"):
            raise ValueError(
                f"value_format must be 'backend_tensor' or 'numpy_array'. Received: value_format={value_format!r}"
            )
        engine = self._engine
        opt_state = None if engine.current is None else engine.current.opt_state
        tree = state_tree(engine.load(None), opt_state, engine.view)
        return tree if value_format == "backend_tensor" else jax.tree.map(np.asarray, tree)

    # OrbaxCheckpoint looks for files that belong to a model, among what Keras can save. Pickling stays Python's.
    __reduce__ = object.__reduce__

    def _obj_type(self) -> str:
        return "Layer"

    def get_config(self) -> dict[str, Any]:
        """Describe the model in words, which are written beside the weights; `save` as a `.keras` file says more."""
        return {"module": repr(self._engine.module)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Refuse to build a model from words.

        Args:
            config: What `get_config` gave.
            custom_objects: As in Keras.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "A checkpoint of OrbaxCheckpoint describes its module in words only. Build dew_keras.Model(module), "
            f"compile it, and read the weights with load_weights(folder). Received: config={config!r}"
        )


def load_orbax_weights(directory: Path, variables: Any, view: StackView) -> Any:
    """Read the weights of the latest step of a folder, each device its own part.

    Args:
        directory: The folder that `OrbaxCheckpoint` wrote, or one step in it.
        variables: The current ones, whose structure and places the result takes.
        view: How the module stores layers.

    Raises:
        FileNotFoundError: If the folder holds no complete step.
        ValueError: If names or shapes differ.
    """
    path = _latest(directory)
    saved = ocp.metadata(path, checkpointable_name="pytree").metadata
    wanted = state_tree(variables, None, view)
    abstract: dict[str, Any] = {}
    for collection in COLLECTIONS:
        _check(path, saved.get(collection, {}), wanted[collection])
        if wanted[collection]:
            abstract[collection] = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), wanted[collection]
            )
    # A full checkpoint holds the optimizer's arrays too.
    options = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
    with ocp.Context(pytree_options=options):
        found = ocp.load_checkpointables(path, {"pytree": abstract})["pytree"]
    return view.stack({"params": found["trainable_variables"], **found.get("non_trainable_variables", {})})


def _latest(directory: Path) -> Path:
    steps = [child for child in directory.iterdir() if child.name.isdigit() and child.is_dir()]
    if steps:
        return max(steps, key=lambda child: int(child.name))
    if (directory / "pytree").is_dir():
        return directory
    raise FileNotFoundError(f"{directory} holds no step that keras.callbacks.OrbaxCheckpoint saved.")


def _check(path: Path, saved: Any, wanted: Any) -> None:
    found, expected = ({name: tuple(leaf.shape) for name, leaf in named_leaves(t).items()} for t in (saved, wanted))
    if found != expected:
        names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        first = names[0]
        raise ValueError(
            f"{path} does not hold this module's weights: they differ at {names[:5]}. "
            f"{first!r} has shape {found.get(first)} there and {expected.get(first)} here."
        )

"""Verbs that read, assign and store weights, which `Model` inherits: `WeightVerbs`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Not public; see `_obj_type`.
from keras.src.saving.keras_saveable import KerasSaveable

from dew.data.text import Tokenizer
from dew.tree import named_leaves, nested
from dew_keras.engine import Engine
from dew_keras.orbax_weights import load_orbax_weights, state_tree
from dew_keras.saving import load_weights, save_model, save_weights
from dew_keras.snapshots import WeightSnapshot, host_leaves


class WeightVerbs(KerasSaveable):
    """Weights on the host and in files, by per-layer names whatever the storage."""

    _engine: Engine
    tokenizer: Tokenizer | None
    _keeps_on_devices = False

    def get_weights(self) -> Sequence[np.ndarray]:
        """Copy every variable to the host, one array per layer and weight, sorted by path."""
        variables = self._engine.variables
        if variables is None:
            variables = self._engine.load(None)
        if self._keeps_on_devices:
            return WeightSnapshot(variables, self._engine.view)
        return host_leaves(variables, self._engine.view)

    @contextlib.contextmanager
    def weights_on_devices(self) -> Iterator[None]:
        """Let `get_weights` give a `WeightSnapshot`, whose items are copied to the host only when they are read."""
        self._keeps_on_devices = True
        try:
            yield
        finally:
            self._keeps_on_devices = False

    def set_weights(self, weights: Any) -> None:
        """Assign what `get_weights` returned; takes effect on the next step, also from a hook.

        Args:
            weights: Arrays in the order of `get_weights`.

        Raises:
            TypeError: If it is no sequence of arrays.
            ValueError: If their number or a shape differs.
        """
        engine = self._engine
        if isinstance(weights, WeightSnapshot) and weights.fits(engine.load(None)):
            # Copied again: training consumes what is assigned, and the snapshot may be used once more.
            engine.assign(jax.tree.map(jnp.copy, weights.variables))
            return
        if isinstance(weights, str | bytes) or not hasattr(weights, "__len__") or not hasattr(weights, "__iter__"):
            raise TypeError(
                f"set_weights needs a list of arrays, as get_weights gives. Received: weights={weights!r} of type "
                f"{type(weights).__name__}"
            )
        current = named_leaves(engine.view.unstack(engine.load(None)))
        if len(weights) != len(current):
            raise ValueError(f"set_weights needs {len(current)} arrays. Received: {len(weights)} arrays")
        named = {}
        for value, (path, leaf) in zip(weights, current.items(), strict=True):
            if np.shape(value) != leaf.shape:
                raise ValueError(f"{path} must have shape {leaf.shape}. Received: shape={np.shape(value)}")
            named[path] = np.asarray(value)
        engine.assign(engine.view.stack(nested(named)))

    def get_state_tree(self, value_format: str = "backend_tensor") -> dict[str, Any]:
        """Name the weights and the optimizer's arrays as they lie on the devices, for `OrbaxCheckpoint`.

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
        """Describe the model in words, for callbacks that write a description beside the weights."""
        return {"name": getattr(self, "name", None), "module": repr(self._engine.module)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Refuse: a Flax module is code, which a description does not hold.

        Args:
            config: What `get_config` gave.
            custom_objects: As in Keras.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"The description of {config.get('name')!r} holds no code of its module. Build dew_keras.Model(module), "
            "compile it, and read the weights with load_weights(path)."
        )

    def save(self, filepath: Any, overwrite: bool = True, zipped: bool | None = None) -> None:
        """Write a language model as a Hugging Face checkpoint directory, whole or not at all.

        Args:
            filepath: The directory.
            overwrite: Whether an earlier checkpoint there may be replaced.
            zipped: Must be None.

        Raises:
            ValueError: If the path names a file, or the module has no such format.
            FileExistsError: If something else is there.
        """
        if zipped is not None:
            raise ValueError(f"zipped is not available: save() writes a directory. Received: zipped={zipped!r}")
        engine = self._engine
        save_model(
            filepath,
            module=engine.module,
            variables=engine.load(None) if engine.is_language_model else engine.variables,
            config=None if engine.preset is None else engine.preset.described.config,
            tokenizer=self.tokenizer,
            generation_config={} if engine.preset is None else engine.preset.described.generation_config,
            is_language_model=engine.is_language_model,
            overwrite=overwrite,
        )

    def save_weights(self, filepath: Any, overwrite: bool = True, max_shard_size: Any = None) -> None:
        """Write the weights into one `.weights.h5` file.

        Args:
            filepath: A path that ends in `.weights.h5`.
            overwrite: Whether an earlier file may be replaced.
            max_shard_size: Must be None.

        Raises:
            ValueError: If the path has another ending.
        """
        if max_shard_size is not None:
            raise ValueError(f"max_shard_size is not available. Received: max_shard_size={max_shard_size}")
        save_weights(filepath, self._engine.load(None), self._engine.view, overwrite=overwrite)

    def load_weights(self, filepath: Any, skip_mismatch: bool = False) -> None:
        """Read what `save_weights` or `keras.callbacks.OrbaxCheckpoint` wrote.

        Args:
            filepath: A path that ends in `.weights.h5`, or the folder of an `OrbaxCheckpoint`, whose latest step
                is read.
            skip_mismatch: Leave out variables whose shape differs or that one side lacks; not with a folder.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If names or shapes differ.
        """
        engine = self._engine
        if Path(filepath).is_dir():
            if skip_mismatch:
                raise ValueError("skip_mismatch goes with a `.weights.h5` file, not with a folder of OrbaxCheckpoint.")
            engine.assign(load_orbax_weights(Path(filepath), engine.load(None), engine.view))
            return
        engine.assign(load_weights(filepath, engine.load(None), engine.view, skip_mismatch=skip_mismatch))

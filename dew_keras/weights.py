"""Verbs that read, assign and store weights, which `Model` inherits: `WeightVerbs`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.data.text import Tokenizer
from dew.tree import named_leaves, nested
from dew_keras.archive import write_archive
from dew_keras.copying import copied
from dew_keras.engine import Engine
from dew_keras.layer_arrays import host_layers, layer_shapes, onto
from dew_keras.module_config import module_config
from dew_keras.orbax_weights import OrbaxVerbs, load_orbax_weights
from dew_keras.run_state import run_arrays, run_facts
from dew_keras.saving import Loaded, is_archive, load_weights, save_model, save_weights
from dew_keras.snapshots import WeightSnapshot, host_leaves
from dew_keras.weights_file import Contents


class WeightVerbs(OrbaxVerbs):
    """Weights on the host and in files, by per-layer names whatever the storage."""

    _engine: Engine
    tokenizer: Tokenizer | None
    _keeps_on_devices = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied(self, memo)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A model is not pickled: its weights are on devices. Use save('name.keras') and load_model, or "
            "copy.deepcopy within one process."
        )

    def get_weights(self) -> Sequence[np.ndarray]:
        """Copy every variable to the host, one array per layer and weight, sorted by path."""
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
        if isinstance(weights, str | bytes) or not hasattr(weights, "__len__") or not hasattr(weights, "__iter__"):
            raise TypeError(
                f"set_weights needs a list of arrays, as get_weights gives. Received: weights={weights!r} of type "
                f"{type(weights).__name__}"
            )
        variables = engine.load(None)
        if isinstance(weights, WeightSnapshot) and weights.fits(variables):
            # Copied again: training consumes what is assigned, and the snapshot may be used once more.
            engine.assign(jax.tree.map(jnp.copy, weights.variables))
            return
        shapes = layer_shapes(variables, engine.view)
        names = list(named_leaves(nested({name: name for name in shapes})))
        if len(weights) != len(names):
            raise ValueError(f"set_weights needs {len(names)} arrays. Received: {len(weights)} arrays")
        for name, value in zip(names, weights, strict=True):
            if np.shape(value) != shapes[name].shape:
                raise ValueError(f"{name} must have shape {shapes[name].shape}. Received: shape={np.shape(value)}")
        engine.assign(onto(variables, dict(zip(names, weights, strict=True)), engine.view))

    def save(self, filepath: Any, overwrite: bool = True, zipped: bool | None = None) -> None:
        """Write the model, whole or not at all.

        Args:
            filepath: A path that ends in `.keras` for the whole model and its run, which `load_model` reads; without
                an extension, for a language model, a Hugging Face checkpoint directory.
            overwrite: Whether an earlier file or checkpoint there may be replaced.
            zipped: None, or what the path says: True with `.keras`.

        Raises:
            ValueError: If the path names another format, or a part of the model cannot be described.
            FileExistsError: If something is there that may not be replaced.
            OSError: If it cannot be written; an earlier file stays.
        """
        engine = self._engine
        if is_archive(filepath, zipped):
            config = model_config(self, engine)
            write_archive(Path(filepath), config, self.tokenizer, contents(engine), overwrite=overwrite)
            return
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
        """Write the weights into one `.weights.h5` file, and the run they belong to.

        Once a fit made an optimizer state the file holds it, the counters and the random key; while a fit runs also
        the place in its data, so that `load_weights` and the same fit go on exactly where the file was written.

        Args:
            filepath: A path that ends in `.weights.h5`.
            overwrite: Whether an earlier file may be replaced.
            max_shard_size: Must be None.

        Raises:
            ValueError: If the path has another ending.
            FileExistsError: If the file is there and may not be replaced.
            OSError: If it cannot be written; an earlier file stays.
        """
        if max_shard_size is not None:
            raise ValueError(
                "max_shard_size is not available: one file of any size is written array by array. Leave it out. "
                f"Received: max_shard_size={max_shard_size}"
            )
        save_weights(filepath, contents(self._engine), overwrite=overwrite)

    def load_weights(self, filepath: Any, skip_mismatch: bool = False) -> None:
        """Read what `save_weights`, `save` as a `.keras` file, or `keras.callbacks.OrbaxCheckpoint` wrote.

        The weights are assigned; a run in the file is gone on with: at once while a fit runs, else by the next fit,
        before `compile` too. That fit leaves out the batches that were consumed when it begins in the file's epoch and
        reads the same batches. A run of another optimizer is left out with a warning.

        Args:
            filepath: A path that ends in `.weights.h5` or `.keras`; or the folder of an `OrbaxCheckpoint`, or one step
                in it, of which the weights alone are read, the latest ones.
            skip_mismatch: Leave out variables whose shape differs or that one side lacks, and their optimizer state;
                not with a folder.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If names or shapes differ; nothing is changed.
        """
        engine = self._engine
        if Path(filepath).is_dir():
            if skip_mismatch:
                raise ValueError("skip_mismatch goes with a file, not with a folder of OrbaxCheckpoint.")
            engine.assign(load_orbax_weights(Path(filepath), engine.load(None), engine.view))
            return
        if skip_mismatch and not engine.makes_weights:
            engine.load(None)  # says how to make the weights that could be compared
        adopt(engine, lambda shapes: load_weights(filepath, shapes, skip_mismatch=skip_mismatch))


def adopt(engine: Engine, read: Callable[[Mapping[str, Any] | None], Loaded]) -> None:
    """Take over what a weights file holds.

    Args:
        engine: The model's engine.
        read: Reads the file for given shapes of the variables; None stands for whatever the file has.
    """
    view = engine.view
    if not engine.makes_weights:
        loaded = read(None)
        engine.given_variables = {"params": {}, **view.stack(nested(loaded.variables))}
        run = loaded.run
    else:
        variables = engine.load(None)
        kept = layer_shapes(variables, view)
        loaded = read(kept)
        run = loaded.run
        if run is not None:
            exact = {name: value for name, value in loaded.variables.items() if value.dtype != kept[name].dtype}
            run = dataclasses.replace(run, exact_variables=exact)
        engine.assign(onto(variables, loaded.variables, view))
    engine.restore(run, loaded.skipped)


def model_config(model: Any, engine: Engine) -> dict[str, Any]:
    """Describe a model as JSON values.

    Args:
        model: The model.
        engine: Its engine.

    Raises:
        ValueError: If a part of it cannot be described.
    """
    tokenizer = model.tokenizer
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise ValueError(
            "A .keras file holds a tokenizer of dew.data.Tokenizer only. Use save_weights(). "
            f"Received: tokenizer of type {type(tokenizer).__name__}"
        )
    described = None if engine.preset is None else engine.preset.described
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "name": model.name,
        "seed": engine.seed,
        "module": module_config(engine.given_module),
        "end_of_turn": None if tokenizer is None else tokenizer.end_of_turn,
        "pretrained": described and {"config": described.config, "generation_config": described.generation_config},
        "compile": model.get_compile_config(),
    }


def contents(engine: Engine) -> Contents:
    """List what a weights file of a model holds now.

    Args:
        engine: The model's engine.
    """
    variables, state, saved, view = engine.load(None), engine.current, engine.waiting.run, engine.view
    accumulation = 1 if engine.compiled is None else engine.compiled.accumulation
    exact: Mapping[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    run: Iterator[tuple[str, np.ndarray]] = iter(())
    if saved is not None:
        exact, run, facts = saved.exact_variables, saved.arrays(), saved.facts()
    elif state is not None:
        run, facts = run_arrays(state, view, engine.progress), run_facts(accumulation, engine.seed, engine.progress)
    held = ((f"variables/{name}", exact.get(name, value)) for name, value in host_layers(variables, view))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves((variables, state if saved is None else None)))
    nbytes += 0 if saved is None else saved.nbytes
    return Contents(arrays=itertools.chain(held, run), facts=facts, nbytes=nbytes)

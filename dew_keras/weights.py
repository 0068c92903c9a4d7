"""Verbs that read, assign and store weights, which `Model` inherits: `WeightVerbs`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dew.data.text import Tokenizer
from dew.tree import named_leaves, nested
from dew_keras.engine import Engine
from dew_keras.layer_arrays import host_layers, layer_shapes, onto
from dew_keras.run_state import run_arrays, run_facts
from dew_keras.saving import Contents, load_weights, save_model, save_weights


class WeightVerbs:
    """Weights on the host and in files, by per-layer names whatever the storage."""

    _engine: Engine
    tokenizer: Tokenizer | None
    count_batches: Callable[[int], None]

    def get_weights(self) -> list[np.ndarray]:
        """Copy every variable to the host, one array per layer and weight, sorted by path."""
        engine = self._engine
        return list(named_leaves(nested(dict(host_layers(engine.load(None), engine.view)))).values())

    def set_weights(self, weights: Any) -> None:
        """Assign what `get_weights` returned; takes effect on the next step, also from a hook.

        Args:
            weights: Arrays in the order of `get_weights`.

        Raises:
            ValueError: If their number or a shape differs.
        """
        engine = self._engine
        variables = engine.load(None)
        shapes = layer_shapes(variables, engine.view)
        names = list(named_leaves(nested({name: name for name in shapes})))
        if len(weights) != len(names):
            raise ValueError(f"set_weights needs {len(names)} arrays. Received: {len(weights)} arrays")
        for name, value in zip(names, weights, strict=True):
            if np.shape(value) != shapes[name].shape:
                raise ValueError(f"{name} must have shape {shapes[name].shape}. Received: shape={np.shape(value)}")
        engine.assign(onto(variables, dict(zip(names, weights, strict=True)), engine.view))

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
            raise ValueError(f"max_shard_size is not available. Received: max_shard_size={max_shard_size}")
        save_weights(filepath, contents(self._engine), overwrite=overwrite)

    def load_weights(self, filepath: Any, skip_mismatch: bool = False) -> None:
        """Read what `save_weights`, or `save` as a `.keras` file, wrote.

        The weights are assigned; a run in the file is gone on with: at once while a fit runs, else by the next fit,
        before `compile` too. That fit leaves out the batches that were consumed when it begins in the file's epoch and
        reads the same batches. A run of another optimizer is left out with a warning.

        Args:
            filepath: A path that ends in `.weights.h5` or `.keras`.
            skip_mismatch: Leave out variables whose shape differs or that one side lacks, and their optimizer state.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If names or shapes differ; nothing is changed.
        """
        engine = self._engine
        if not engine.makes_weights:
            if skip_mismatch:
                engine.load(None)  # says how to make the weights that could be compared
            loaded = load_weights(filepath, None)
            engine.give(engine.view.stack(nested(loaded.variables)))
            engine.restore(loaded.run)
        else:
            variables = engine.load(None)
            kept = layer_shapes(variables, engine.view)
            loaded = load_weights(filepath, kept, skip_mismatch=skip_mismatch)
            run = loaded.run
            if run is not None:
                exact = {name: value for name, value in loaded.variables.items() if value.dtype != kept[name].dtype}
                run = dataclasses.replace(run, exact_variables=exact)
            engine.assign(onto(variables, loaded.variables, engine.view))
            engine.restore(run, loaded.skipped)
        if loaded.run is not None:
            self.count_batches(loaded.run.batches // loaded.run.accumulation)


def contents(engine: Engine) -> Contents:
    """List what a weights file of a model holds now.

    Args:
        engine: The model's engine.
    """
    variables, state, saved, view = engine.load(None), engine.current, engine.pending, engine.view
    accumulation = 1 if engine.compiled is None else engine.compiled.accumulation
    exact: Mapping[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    run: Iterator[tuple[str, np.ndarray]] = iter(())
    if saved is not None:
        exact, run, facts = saved.exact_variables, saved.arrays(), saved.facts()
    elif state is not None:
        run, facts = run_arrays(state, view, engine.progress), run_facts(accumulation, engine.progress)
    held = ((f"variables/{name}", exact.get(name, value)) for name, value in host_layers(variables, view))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves((variables, state if saved is None else None)))
    nbytes += 0 if saved is None else saved.nbytes
    return Contents(arrays=itertools.chain(held, run), facts=facts, nbytes=nbytes)

"""Models out of files: `.keras` archives as they were saved, and Hugging Face checkpoints.

Entry point: `load_model`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from dew.data.text import Tokenizer
from dew.placement.mesh import as_mesh
from dew.pretrained import PretrainedConfig
from dew.pretrained.families import FAMILIES
from dew.tree import nested
from dew_keras.archive import SUFFIX, Archive
from dew_keras.model import Model
from dew_keras.module_config import custom_object, module_from_config
from dew_keras.presets import Preset
from dew_keras.saving import read_weights
from dew_keras.weights_file import ArrayFile, DamagedFileError

# What config.json holds beside the format.
DESCRIPTION: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "name": (str,),
    "seed": (int,),
    "module": (dict,),
    "end_of_turn": (str, type(None)),
    "pretrained": (dict, type(None)),
    "compile": (dict, type(None)),
}


def load_model(
    filepath: Any,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,  # noqa: A002 - Keras' name
    safe_mode: bool = True,
) -> Model:
    """Build the model that `Model.save` wrote, with its weights and its run: the next `fit` goes on with it.

    Args:
        filepath: A `.keras` file, or a Hugging Face checkpoint directory.
        custom_objects: Classes and functions of yours that the model is made of, by name.
        compile: Whether to compile it as it was.
        safe_mode: Whether to refuse to import what the file names beside dew, Flax and Keras.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file needs something that was not given, or is another library's.
        DamagedFileError: If a part of it cannot be read as it was written.
    """
    path = Path(filepath)
    if path.is_dir():
        return Model.from_preset(path)
    if path.suffix != SUFFIX:
        raise ValueError(
            f"load_model reads a `{SUFFIX}` file of Model.save or a Hugging Face directory; for a `.weights.h5` file "
            f"build the model and call load_weights. Received: filepath={str(filepath)!r}"
        )
    with Archive(path) as archive:
        config = archive.config()
        _check_description(config, str(path))
        model = _built(config, archive.tokenizer(), custom_objects, str(path), safe_mode=safe_mode)
        if compile and config["compile"] is not None:
            with _scope(custom_objects):
                _compile(model, config["compile"], str(path))
        with archive.weights() as entry, ArrayFile(entry, str(path)) as file:
            loaded = read_weights(file, None, skip_mismatch=False)
    model._engine.given_variables = {"params": {}, **model._engine.view.stack(nested(loaded.variables))}
    model._engine.load(None)
    model._engine.restore(loaded.run)
    return model


def _compile(model: Model, config: Any, title: str) -> None:
    """Compile a model as the file says; on all devices on data where these are too few or too many for its mesh."""
    if config.get("mesh") is not None and (problem := _mesh_problem(config["mesh"])):
        warnings.warn(
            f"{title} was compiled with mesh={config['mesh']}, which is not possible here: {problem} The model is "
            "compiled on all devices on data; compile it again to place it otherwise, with the same optimizer to go on "
            "with its run.",
            stacklevel=3,
        )
        config = {**config, "mesh": None}
    try:
        model.compile_from_config(config)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{title} cannot be compiled as it was ({type(error).__name__}: {error}). Pass classes and functions of "
            "your own in custom_objects, or load with compile=False and call compile()."
        ) from error


def _mesh_problem(mesh: Any) -> str:
    try:
        as_mesh(mesh)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _check_description(config: Mapping[str, Any], title: str) -> None:
    for name, kinds in DESCRIPTION.items():
        if name not in config or not isinstance(config[name], kinds) or isinstance(config[name], bool):
            value = repr(config.get(name, "nothing"))[:100]
            raise DamagedFileError(f"{title} is damaged: its description says {name}={value}. Save the model again.")


def _scope(custom_objects: Mapping[str, Any] | None) -> contextlib.AbstractContextManager[Any]:
    # An empty scope would hide the objects of one that the caller opened.
    return keras.saving.custom_object_scope(dict(custom_objects)) if custom_objects else contextlib.nullcontext()


def _built(
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    custom_objects: Mapping[str, Any] | None,
    title: str,
    *,
    safe_mode: bool,
) -> Model:
    try:
        module = module_from_config(config["module"], custom_objects, safe_mode=safe_mode)
        name, seed = config["name"], config["seed"]
        if tokenizer is not None and config["end_of_turn"] is not None:
            tokenizer = dataclasses.replace(tokenizer, end_of_turn=str(config["end_of_turn"]))
        preset = _preset(config["pretrained"], module, tokenizer, title)
        kind = _model_class(str(config["model"]), custom_objects, safe_mode=safe_mode)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"{title} describes a model that cannot be built: {error!r}.") from error
    except ValueError as error:
        raise ValueError(f"{title} describes a model that cannot be built: {error}") from error
    return kind(module, tokenizer, seed=seed, name=name, _preset=preset)


def _preset(pretrained: Any, module: Any, tokenizer: Tokenizer | None, title: str) -> Preset | None:
    """Keep what the checkpoint said that the model came from; its weights are those of the file."""
    if pretrained is None or pretrained["config"].get("model_type") not in FAMILIES:
        return None

    def closed() -> Any:
        raise AssertionError("the weights of a .keras file are read with the file")

    described = PretrainedConfig(
        module=module,
        config=dict(pretrained["config"]),
        tokenizer=tokenizer,
        generation_config=dict(pretrained["generation_config"]),
        family=FAMILIES[pretrained["config"]["model_type"]],
        source=title,
        open_source=closed,
    )
    return Preset(described, load_weights=False)


def _model_class(name: str, custom_objects: Mapping[str, Any] | None, *, safe_mode: bool) -> type[Model]:
    module, _, short = name.rpartition(".")
    found = custom_object(name, custom_objects)
    if found is None and name == f"{Model.__module__}.{Model.__qualname__}":
        return Model
    if found is None and safe_mode:
        raise ValueError(
            f"The file holds a model of the class {name!r}. Pass custom_objects={{{short!r}: {short}}}, or "
            "safe_mode=False to import it by that name, which runs its code."
        )
    found = getattr(importlib.import_module(module), short) if found is None else found
    if not isinstance(found, type) or not issubclass(found, Model):
        raise ValueError(f"{name!r} is no subclass of dew_keras.Model. Received: {found!r}")
    return found

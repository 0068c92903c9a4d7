"""Write a model as a Hugging Face checkpoint directory that transformers and `load_pretrained` read.

Entry point: `save_pretrained`. Tensors are written one at a time from the sharded arrays; the directory appears
under its name only when it is complete.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import struct
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dew.data.text import Tokenizer
from dew.files import check_room, unwritten
from dew.nn.backbones.causal_transformer import DROPOUT_RATES, CausalTransformer
from dew.nn.router import RouterTraining, is_balance_bias
from dew.placement.processes import host_pieces, write_once
from dew.pretrained.families import FAMILIES, Family
from dew.pretrained.families.fields import Fields
from dew.pretrained.load import compute_dtype, model_recipes
from dew.pretrained.place import copy_tiled
from dew.pretrained.recipe import Recipe
from dew.pretrained.safetensors import DTYPES, INDEX_NAME, SINGLE_NAME
from dew.tree import named_leaves

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# What an earlier export may hold: a directory with nothing else is replaced, any other is left alone.
_REPLACEABLE = (
    *("config.json", "generation_config.json", INDEX_NAME, SINGLE_NAME),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor to write: from which layer of which leaf or leaves, and its size in the file."""

    name: str
    parts: tuple[tuple[Recipe, int], ...]
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0][0].tensor_shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_wide(self) -> bool:
        """Whether it is float32 in a checkpoint of any dtype."""
        return all(is_balance_bias(recipe.path) for recipe, _ in self.parts)


def save_pretrained(
    directory: str | Path,
    module: CausalTransformer,
    variables: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    *,
    dtype: Any = None,
    max_shard_bytes: float = 5e9,
) -> Path:
    """Write a checkpoint directory, whole or not at all.

    Args:
        directory: Where to write. An earlier export there is replaced once the new one is complete.
        module: The model.
        variables: Its variables, on any mesh.
        config: Config the model was loaded with; its further fields are kept where they hold for this model, and left
            out with a warning where they do not. None writes a new one.
        tokenizer: Written beside the weights.
        generation_config: Written beside the weights when it is not empty.
        dtype: Dtype to write; None takes the checkpoint's (the config's), without a config that of each leaf. Balance
            biases are written as they are stored, in float32.
        max_shard_bytes: Largest weight file; a larger model is split into shards with an index.

    Returns:
        The directory.

    Raises:
        ValueError: If no config can express the model, or the variables or the tokenizer are not the model's.
        FileExistsError: If the directory holds other files.
        OSError: If it cannot be written; an earlier export stays.
    """
    directory = Path(directory).absolute()
    if not max_shard_bytes > 0:
        raise ValueError(f"max_shard_bytes must be positive. Received: max_shard_bytes={max_shard_bytes}")
    _check_replaceable(directory)
    if tokenizer is not None and tokenizer.vocab_size > module.vocab_size:
        raise ValueError(
            f"The tokenizer has {tokenizer.vocab_size} tokens, the model {module.vocab_size}: what is written would "
            "not load. Give the tokenizer of this model, or None."
        )
    family, written_config = export_config(module, config)
    _warn_of_training(family, module)
    stated = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
    target = stated if dtype is None else compute_dtype(dtype)
    tensors, arrays = _tensors(family, module, variables, target)
    largest = max((tensor.dtype for tensor in tensors if not tensor.is_wide), key=lambda each: each.itemsize)
    written_config["dtype"] = largest.name

    def write(values: Iterator[np.ndarray]) -> None:
        with _beside(directory, sum(tensor.nbytes for tensor in tensors)) as unfinished:
            _write_json(unfinished / "config.json", written_config)
            if generation_config:
                _write_json(unfinished / "generation_config.json", generation_config)
            if tokenizer is not None:
                tokenizer.save(unfinished)
            _write_weights(unfinished, tensors, values, max_shard_bytes)

    write_once(write, (_stored(tensor, arrays) for tensor in tensors))
    return directory


def export_config(module: CausalTransformer, config: Mapping[str, Any] | None) -> tuple[Family, dict[str, Any]]:
    """Find the family that expresses a model and write its config, checked by reading it back.

    Args:
        module: The model.
        config: Config it was loaded with, or None.

    Raises:
        ValueError: If no family, or not the config's own, expresses the model, with the reason of each.
    """
    reasons = []
    wanted = None if config is None else config.get("model_type")
    for family in FAMILIES.values():
        if wanted is not None and family.model_type != wanted:
            continue
        try:
            fields = family.config_dict(module)
        except ValueError as error:
            reasons.append(f"{family.model_type}: {error}")
            continue
        if misread := _misread(family, module, fields):
            reasons.append(f"{family.model_type}: {misread}")
            continue
        kept = {name: value for name, value in (config or {}).items() if name not in _REWRITTEN}
        identity = {"model_type": family.model_type, "architectures": [family.architecture]}
        return family, _merged(family, module, kept, {**identity, **fields})
    if wanted is not None and wanted not in FAMILIES:
        reasons.append(f"model_type={wanted!r} is not one of {', '.join(FAMILIES)}")
    raise ValueError("This model cannot be written as a Hugging Face checkpoint. " + "; ".join(reasons))


def _misread(family: Family, module: CausalTransformer, config: Mapping[str, Any]) -> str | None:
    """Say why a config would not load as the model; None where it would."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a load says of these fields was said when they were loaded
            read_back = family.translate(Fields(config, "the exported config"))
    except ValueError as error:
        return str(error)
    expressed = CausalTransformer(**read_back)
    different = [name for name in _COMPUTED if getattr(module, name) != getattr(expressed, name)]
    return f"its config cannot express this model's {', '.join(different)}" if different else None


def _merged(
    family: Family, module: CausalTransformer, kept: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Put the fields of a model beside those that its config had, and leave out what no longer holds for it."""
    merged = {**kept, **fields}
    if _misread(family, module, merged) is None:
        return merged
    held: dict[str, Any] = {}
    for name, value in kept.items():
        if name in fields or _misread(family, module, {**held, name: value, **fields}) is None:
            held[name] = value
    left_out = ", ".join(f"{name}={str(kept[name])[:60]}" for name in kept if name not in held)
    warnings.warn(
        "The model is no longer what its config said; what does not hold for it is left out of config.json: "
        f"{left_out}.",
        stacklevel=4,
    )
    return {**held, **fields}


def _warn_of_training(family: Family, module: CausalTransformer) -> None:
    """Name what trains routers, and rates of dropout, that have no place in a config; the model computes the same."""
    read_back = family.translate(Fields(family.config_dict(module), "the exported config"))
    expressed = read_back.get("router_training", RouterTraining())
    written, asked = dataclasses.asdict(expressed), dataclasses.asdict(module.router_training)
    lost = [f"{name}={value} of router_training" for name, value in asked.items() if written[name] != value]
    rates = {name: getattr(module, name) for name in DROPOUT_RATES}
    lost += [f"{name}={rate}" for name, rate in rates.items() if read_back.get(name, 0.0) != rate]
    if lost:
        warnings.warn(
            f"The config of {family.model_type} has no place for {', '.join(lost)}. What was written computes the "
            "same; to train it further with these, set them again: module.clone(router_training=RouterTraining(...), "
            "dropout_rate=...).",
            stacklevel=3,
        )


# Fields of a model that decide what it computes; the others say how.
_COMPUTED = (
    *("vocab_size", "features", "layers", "norm", "embedding", "head", "tie_embeddings", "max_length"),
    "prediction",
)
# Older spellings of fields that `config_dict` writes, which kept beside them would say something twice; and what an
# export is not, packed, or may lack, layers that predict further tokens.
_REWRITTEN = (
    *("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"),
    *("torch_dtype", "dtype", "_name_or_path", "transformers_version", "quantization_config"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers"),
)


def _tensors(
    family: Family, module: CausalTransformer, variables: Mapping[str, Any], dtype: str | None
) -> tuple[list[_Tensor], dict[str, Any]]:
    """List what is written, after checking that the variables are the model's."""
    todo = {recipe.path: recipe for recipe in model_recipes(family, module)}
    arrays = named_leaves({"params": variables.get("params", {})})
    wrong = list(todo.keys() ^ arrays.keys())
    wrong += [path for path in todo.keys() & arrays.keys() if tuple(arrays[path].shape) != todo[path].shape]
    if wrong:
        raise ValueError(
            f"The variables are not those of the model: {len(wrong)} leaves are missing, left over or of another "
            f"shape, such as {sorted(wrong)[:3]}."
        )
    parts: dict[str, list[tuple[Recipe, int]]] = {}
    for recipe in todo.values():
        for layer, name in enumerate(recipe.sources):
            parts.setdefault(name, []).append((recipe, layer))
    tensors = []
    for name, pieces in parts.items():
        narrow = [recipe.path for recipe, _ in pieces if dtype is not None and not is_balance_bias(recipe.path)]
        dtypes = [np.dtype(dtype if recipe.path in narrow else arrays[recipe.path].dtype) for recipe, _ in pieces]
        tensors.append(_Tensor(name, tuple(pieces), max(dtypes, key=lambda each: each.itemsize)))
    if family.prediction is not None:
        written = {tensor.name: tensor for tensor in tensors}
        copies = family.prediction.copies_of(module)
        tensors += [dataclasses.replace(written[original], name=name) for name, original in copies.items()]
    return tensors, arrays


def _write_weights(
    directory: Path, tensors: Sequence[_Tensor], values: Iterator[np.ndarray], max_shard_bytes: float
) -> None:
    """Write the shards, and the index after the last of them."""
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(each.nbytes for each in shards[-1]) + tensor.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        with (directory / name).open("wb") as file:
            _write_shard(file, shard, values)
            _sync(file)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in tensors)
        _write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_shard(file: BinaryIO, tensors: Sequence[_Tensor], values: Iterator[np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    file.write(struct.pack("<Q", len(text)) + text)
    for _ in tensors:
        file.write(next(values).reshape(-1).view(np.uint8).data)


def _stored(tensor: _Tensor, arrays: Mapping[str, Any]) -> np.ndarray:
    """Bring one tensor to the host in the file's arrangement."""
    result = np.empty(tensor.shape, tensor.dtype)
    for recipe, number in tensor.parts:
        leaf = arrays[recipe.path]
        place = recipe.place_of(number)
        # Tiles run along the source's rows: seen from the leaf's side the copy is the one that loading makes.
        layer = recipe.in_leaf_order(recipe.part_of(result))
        for index, values in host_pieces(leaf, place):
            copy_tiled(layer[index], values)
    return result


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check_replaceable(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise FileExistsError(f"{directory} is a file; give a directory to export to.")
    names = sorted(entry.name for entry in directory.iterdir())
    other = [n for n in names if n not in _REPLACEABLE and not (n.startswith("model-") and n.endswith(".safetensors"))]
    if other:
        raise FileExistsError(
            f"{directory} holds files that no export wrote, such as {other[0]!r}. Give a new or empty directory."
        )


@contextlib.contextmanager
def _beside(directory: Path, nbytes: int) -> Iterator[Path]:
    """Give a directory beside the wanted one that takes its name on success and vanishes on failure."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    check_room(directory, nbytes)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".unfinished", dir=directory.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        if directory.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".replaced", dir=directory.parent))
            directory.rename(replaced / directory.name)
            try:
                unfinished.rename(directory)
            except OSError:
                (replaced / directory.name).rename(directory)
                raise
            finally:
                shutil.rmtree(replaced, ignore_errors=True)
        else:
            unfinished.rename(directory)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise unwritten(directory, nbytes, error) from error
        raise

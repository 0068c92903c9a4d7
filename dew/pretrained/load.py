"""Load a checkpoint: describe it from its config, then stream its weights onto a mesh.

Entry points: `load_pretrained`, `describe`. Everything that can be refused is refused before a weight is read.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dew.data.text import Tokenizer
from dew.data.tokenizers.directory import SLOW_TOKENIZER_FILES, has_tokenizer
from dew.nn.backbones.causal_transformer import DROPOUT_RATES, CausalTransformer
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, as_mesh
from dew.placement.stacks import is_box, stack_view
from dew.pretrained.block_scales import BlockScaledSource, block_scales
from dew.pretrained.canonical import canonical_names
from dew.pretrained.families import Family, family_of
from dew.pretrained.families.fields import MAX_LAYERS, MAX_PREDICTION_LAYERS, Fields
from dew.pretrained.families.prediction import LOAD_WITHOUT
from dew.pretrained.families.wrapped import language_config
from dew.pretrained.formats import GGUF_ARCHITECTURES
from dew.pretrained.gguf import GgufFile, GgufSource
from dew.pretrained.hub import CONFIG_FILES, locate, repository_of
from dew.pretrained.mxfp4 import is_mxfp4
from dew.pretrained.place import ProgressCallback, place
from dew.pretrained.prediction import counted_layers, further_tensors, tensor_names
from dew.pretrained.progress import showing
from dew.pretrained.recipe import MAX_EXPERTS_OF_MODEL, Recipe, check_coverage, recipes
from dew.pretrained.safetensors import SINGLE_NAME, has_safetensors, open_safetensors
from dew.pretrained.source import CheckpointError, TensorSource, contained, read_json
from dew.pretrained.torch_pickle import open_pickled
from dew.tree import closest, matches, named_leaves, nested

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainedConfig:
    """What a checkpoint says about itself before any weight is read.

    Attributes:
        module: The model, without variables.
        config: The config in Hugging Face fields.
        tokenizer: Its tokenizer; None when the checkpoint has none.
        generation_config: Defaults for generation; empty when the checkpoint has none.
        family: The family that reads and writes it.
        source: As the caller named it.
        open_source: Fetches the weights if they are not here yet, and opens them.
        omitted: Globs of tensors that are left out because the caller said so.
    """

    module: CausalTransformer
    config: dict[str, Any]
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any]
    family: Family
    source: str
    open_source: Callable[[], TensorSource]
    omitted: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A loaded checkpoint.

    Attributes:
        module: The model.
        variables: Its weights on the mesh, `{"params": ...}`.
        tokenizer: Its tokenizer; None when the checkpoint has none.
        config: The config in Hugging Face fields.
        generation_config: Defaults for generation.
        mesh: Where the weights are.
        layout: By which rules.
        source: As the caller named it.
    """

    module: CausalTransformer
    variables: dict[str, Any]
    tokenizer: Tokenizer | None
    config: dict[str, Any]
    generation_config: dict[str, Any]
    mesh: Mesh
    layout: Layout
    source: str


def load_pretrained(
    source: str | Path,
    *,
    mesh: Mesh | MeshSpec | Mapping[str, int] | None = None,
    layout: Layout | None = None,
    dtype: Any = None,
    param_dtype: Any = None,
    revision: str | None = None,
    progress: ProgressCallback | bool | None = None,
    allow_pickle: bool = False,
    scan_layers: bool = True,
    bank_layers: int | None = None,
    remat: str | None = None,
    prediction_layers: bool = True,
    dropout: bool = True,
) -> Pretrained:
    """Load a checkpoint onto a mesh.

    Args:
        source: A directory, a `.gguf` file, `org/name[@revision]` or `hf://org/name[@revision]`.
        mesh: Mesh, `MeshSpec` or dict of its fields; None puts all devices on data.
        layout: Rules of placement; None takes the defaults.
        dtype: Compute dtype; None takes the checkpoint's, float32 for GGUF.
        param_dtype: Storage dtype of the weights; None takes `dtype` when it is given, else what the file holds.
        revision: Branch, tag or commit of a repository.
        progress: Called with (bytes placed, bytes in all); True shows a bar in process 0, None does so on a terminal.
        allow_pickle: Whether to read pickled `pytorch_model.bin` weights where there are no safetensors. They are
            interpreted as tensors only; no code in them is run.
        scan_layers: Whether to store runs of like layers as banks.
        bank_layers: Most layers of a bank.
        remat: What the backward pass recomputes.
        prediction_layers: Whether to load layers that predict tokens after the next one where the checkpoint has them;
            False leaves them out.
        dropout: Whether training drops at the rates of the config; False sets them to 0.

    Returns:
        The model, its variables on the mesh, and what came with it.

    Raises:
        CheckpointError: If the checkpoint is damaged, or is not one this library computes exactly.
        LayoutRefused: If the layout replicates too much or the mesh cannot hold a model.
        FileNotFoundError: If there is no such source.
    """
    described = describe(
        source,
        revision=revision,
        dtype=dtype,
        allow_pickle=allow_pickle,
        scan_layers=scan_layers,
        bank_layers=bank_layers,
        remat=remat,
        prediction_layers=prediction_layers,
        dropout=dropout,
    )
    mesh, layout = as_mesh(mesh), layout or Layout()
    variables = load_variables(
        described,
        mesh=mesh,
        layout=layout,
        param_dtype=dtype if param_dtype is None else param_dtype,
        progress=progress,
    )
    return Pretrained(
        module=described.module,
        variables=variables,
        tokenizer=described.tokenizer,
        config=described.config,
        generation_config=described.generation_config,
        mesh=mesh,
        layout=layout,
        source=described.source,
    )


def describe(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: Any = None,
    allow_pickle: bool = False,
    scan_layers: bool = True,
    bank_layers: int | None = None,
    remat: str | None = None,
    prediction_layers: bool = True,
    dropout: bool = True,
) -> PretrainedConfig:
    """Read the config and the tokenizer of a checkpoint, and no weight.

    Whether a family's layers that predict further tokens are there is read off the names of the tensors: from a
    repository without an index the header of its one file is fetched for that.

    Args:
        source: As `load_pretrained`.
        revision: As `load_pretrained`.
        dtype: As `load_pretrained`.
        allow_pickle: As `load_pretrained`.
        scan_layers: As `load_pretrained`.
        bank_layers: As `load_pretrained`.
        remat: As `load_pretrained`.
        prediction_layers: As `load_pretrained`.
        dropout: As `load_pretrained`.

    Raises:
        CheckpointError: If the config is not understood in every field that matters.
        FileNotFoundError: If there is no such source.
    """
    path = locate(source, revision, weights=False)
    if path.is_file():
        config, tokenizer, generation_config, open_source = _describe_gguf(path)
        stored_dtype = "float32"
    else:
        config, tokenizer, generation_config = _describe_directory(path)
        config = language_config(config, source)
        open_source = functools.partial(_open_directory, source, path, allow_pickle=allow_pickle)
        stored_dtype = _stored_dtype(config, path)
        config, open_source = _scaled(config, open_source, stored_dtype if dtype is None else dtype, source)
    family = family_of(config, source)
    if family.unpacked is not None:
        open_source = functools.partial(_open_unpacked, open_source, family.unpacked, source)
    _check_depth(config, source)
    names = functools.partial(tensor_names, source, path, open_source)
    counted, omitted = counted_layers(family, config, names, source, wanted=prediction_layers)
    arguments = family.translate(Fields(counted, source))
    if tokenizer is not None and tokenizer.vocab_size > arguments["vocab_size"]:
        raise CheckpointError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, the model {arguments['vocab_size']}. They do "
            "not belong together."
        )
    if not dropout:
        arguments |= dict.fromkeys(DROPOUT_RATES, 0.0)
    module = CausalTransformer(
        **arguments,
        dtype=compute_dtype(stored_dtype if dtype is None else dtype),
        param_dtype=stored_dtype if dtype is None else compute_dtype(dtype),
        scan_layers=scan_layers,
        bank_layers=bank_layers,
        remat=remat,
    )
    num_experts = sum(spec.num_experts for spec in (*module.expert_layers, *module.prediction_experts))
    if num_experts > MAX_EXPERTS_OF_MODEL:
        raise CheckpointError(f"{source}: {num_experts} experts in all; at most {MAX_EXPERTS_OF_MODEL} are read.")
    return PretrainedConfig(
        module=module,
        config=config,
        tokenizer=tokenizer,
        generation_config=generation_config,
        family=family,
        source=str(source),
        open_source=open_source,
        omitted=omitted,
    )


def load_variables(
    described: PretrainedConfig,
    *,
    mesh: Mesh,
    layout: Layout,
    module: CausalTransformer | None = None,
    param_dtype: Any = None,
    progress: ProgressCallback | bool | None = None,
) -> dict[str, Any]:
    """Stream the weights of a described checkpoint onto a mesh.

    Args:
        described: What `describe` returned.
        mesh: A mesh with the six axes.
        layout: Rules of placement.
        module: The described module with other storage or remat; None takes it as described.
        param_dtype: Storage dtype; None keeps what the file holds.
        progress: As `load_pretrained`.

    Returns:
        Variables of the module, `{"params": ...}`.

    Raises:
        CheckpointError: If the weights do not fit the config or are damaged. Nothing is placed then.
        LayoutRefused: If the layout replicates too much or the mesh cannot hold a model. Nothing is read then.
    """
    module = described.module if module is None else module
    dtype = None if param_dtype is None else compute_dtype(param_dtype)
    abstract, view = abstract_variables(module), stack_view(module)
    shardings = layout.shardings(mesh, abstract)
    layout.check(mesh, abstract, shardings, view)
    todo = model_recipes(described.family, module, abstract)
    source = described.open_source()
    try:
        source = canonical_names(source, {name for recipe in todo for name in recipe.sources}, described.source)
        ignorable = (*described.family.ignorable, *_left_out(described, source), *described.omitted)
        if described.family.prediction is not None:
            ignorable = (*ignorable, *described.family.prediction.copies_of(module))
        if module.tie_embeddings:
            ignorable = (*ignorable, *_tied_head(source, todo, described.family, described.source))
        optional = further_tensors(described.family, described.config)
        check_coverage(todo, source, ignorable, described.source, optional=optional, advice=LOAD_WITHOUT)
        with showing(progress, f"Loading {Path(described.source).name}") as told:
            return nested(place(todo, named_leaves(shardings), source, dtype, progress=told))
    finally:
        source.close()


@functools.lru_cache(maxsize=8)
def abstract_variables(module: CausalTransformer) -> dict[str, Any]:
    """Shapes of a model's variables, in the boxes that declare their logical names. Allocates nothing."""
    return jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))


def model_recipes(family: Family, module: CausalTransformer, abstract: Any = None) -> tuple[Recipe, ...]:
    """Recipe of every leaf of a model, for load and for export.

    Args:
        family: The family that names the weights.
        module: The model.
        abstract: Its `abstract_variables`, where the caller has them already: tracing them takes a while.
    """
    leaves = named_leaves(abstract_variables(module) if abstract is None else abstract, is_leaf=is_box)
    shapes = {path: tuple((leaf.value if is_box(leaf) else leaf).shape) for path, leaf in leaves.items()}
    return recipes(family.weights_of(module), shapes, stack_view(module))


def compute_dtype(dtype: Any) -> str:
    """Name of a floating-point dtype that a model computes in.

    Raises:
        ValueError: If it is not one of `COMPUTE_DTYPES`.
    """
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in COMPUTE_DTYPES:
        near = closest(name, COMPUTE_DTYPES)
        raise ValueError(
            f"dtype must be one of {', '.join(COMPUTE_DTYPES)}. Received: dtype={dtype!r}."
            + (f" Did you mean {near!r}?" if near else "")
        )
    return name


def _left_out(described: PretrainedConfig, source: TensorSource) -> tuple[str, ...]:
    """Say which tensors of layers that are not computed here a load passes over; gives the globs of all such."""
    layers = described.family.left_out(described.config)
    present = {glob: what for glob, what in layers.items() if any(matches(name, glob) for name in source.names())}
    for what in dict.fromkeys(present.values()):
        globs = ", ".join(glob for glob in present if present[glob] == what)
        warnings.warn(
            f"{described.source}: the tensors {globs} are left out. They belong to {what}, which are not computed "
            "here; the logits of a text do not depend on them, and what is saved from here has none.",
            stacklevel=3,
        )
    return tuple(layers)


def _check_depth(config: dict[str, Any], where: object) -> None:
    """Refuse a number of layers that no model has, before a list of them is made."""
    most = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), MAX_LAYERS)
    most |= dict.fromkeys(("num_nextn_predict_layers", "mtp_num_hidden_layers"), MAX_PREDICTION_LAYERS)
    for name, limit in most.items():
        if type(config.get(name)) is int and config[name] > limit:
            raise CheckpointError(f"{where}: {name}={config[name]}; at most {limit} layers are read.")


def _describe_directory(path: Path) -> tuple[dict[str, Any], Tokenizer | None, dict[str, Any]]:
    config_path = contained(path, "config.json")
    if not config_path.exists():
        raise FileNotFoundError(f"{path} has no config.json, so it is not a checkpoint directory.")
    generation_path = contained(path, "generation_config.json")
    generation_config = read_json(generation_path) if generation_path.exists() else {}
    for name in (*CONFIG_FILES, *SLOW_TOKENIZER_FILES):
        contained(path, name)
    return read_json(config_path), Tokenizer.from_directory(path) if has_tokenizer(path) else None, generation_config


def _describe_gguf(
    path: Path,
) -> tuple[dict[str, Any], Tokenizer | None, dict[str, Any], Callable[[], TensorSource]]:
    file = GgufFile(path)
    num_files = file.metadata.get("split.count", 1)
    if num_files != 1:
        raise CheckpointError(
            f"{path} is one of {num_files} files of a checkpoint. Join them first: llama-gguf-split --merge FIRST OUT"
        )
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{path}: GGUF architecture {architecture!r} is not supported. Known: {', '.join(GGUF_ARCHITECTURES)}."
        )
    reader = GGUF_ARCHITECTURES[architecture]
    config = reader.config(file)
    tokenizer = Tokenizer.from_gguf(file.metadata) if "tokenizer.ggml.model" in file.metadata else None
    tokens: dict[str, Any] = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config
    }

    def open_source() -> TensorSource:
        return GgufSource(
            file,
            reader.tensor_name,
            lambda name, rows: reader.row_order(name, rows, config),
            is_shifted=reader.is_shifted,
            is_transposed=reader.is_transposed,
            left_out=reader.consumed(config),
        )

    return config, tokenizer, tokens, open_source


def _open_directory(source: str | Path, path: Path, *, allow_pickle: bool) -> TensorSource:
    """Open the weights beside a described config, from the same commit when they come from the Hub."""
    repository = repository_of(source)
    if repository is not None:
        path = locate(f"hf://{repository}", path.name, allow_pickle=allow_pickle)
    return open_pickled(path) if allow_pickle and not has_safetensors(path) else open_safetensors(path)


def _open_unpacked(
    open_source: Callable[[], TensorSource], unpacked: Callable[[TensorSource, object], TensorSource], where: object
) -> TensorSource:
    """Open a checkpoint that may hold packed tensors, and give it back if they are damaged."""
    source = open_source()
    try:
        return unpacked(source, where)
    except CheckpointError:
        source.close()
        raise


def _scaled(
    config: dict[str, Any], open_source: Callable[[], TensorSource], dtype: Any, where: object
) -> tuple[dict[str, Any], Callable[[], TensorSource]]:
    """Where a config says that matrices are float8 in blocks, read them in `dtype`; what is loaded is not quantised."""
    scales = block_scales(config, where)
    if scales is None:
        return config, open_source
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    product_dtype = jnp.dtype(compute_dtype(dtype))
    return config, lambda: BlockScaledSource(open_source(), scales, product_dtype, where)


def _stored_dtype(config: dict[str, Any], path: Path) -> str:
    """The checkpoint's dtype: what its config says, else that of its largest kind of tensor, else float32."""
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is not None:
        name = str(stated).removeprefix("torch.")
        if name not in COMPUTE_DTYPES:
            raise CheckpointError(f"{path}: dtype={stated!r} is not supported; known: {', '.join(COMPUTE_DTYPES)}.")
        return name
    if is_mxfp4(config.get("quantization_config")):
        return "bfloat16"  # what the packed values are exact in
    if not contained(path, SINGLE_NAME).exists():
        return "float32"
    weights = open_safetensors(path)
    nbytes: dict[str, int] = {}
    for name in weights.names():
        shape, dtype = weights.info(name)
        nbytes[dtype.name] = nbytes.get(dtype.name, 0) + int(np.prod(shape)) * dtype.itemsize
    weights.close()
    largest = max(nbytes, key=nbytes.__getitem__, default="float32")
    return largest if largest in COMPUTE_DTYPES else "float32"


def _tied_head(source: TensorSource, todo: tuple[Recipe, ...], family: Family, where: str) -> tuple[str, ...]:
    """Name the head that is stored beside the table it is tied to, checked to be the same: it is then left out."""
    table_recipe = next(recipe for recipe in todo if recipe.path == "params/embed_tokens/embedding")
    table = table_recipe.sources[0]
    head = next(weight.tensor for weight in family.weights if weight.path == "params/lm_head/embedding")
    names = set(source.names())
    if head not in names:
        return ()
    shape, step = table_recipe.tensor_shape, 4096
    if table not in names or source.info(table).shape != shape:
        return (head,)  # the table itself does not fit
    same = source.info(table) == source.info(head)
    for start in range(0, shape[0] if same else 0, step):
        index = (slice(start, min(start + step, shape[0])), slice(0, shape[1]))
        same = same and np.array_equal(source.read(table, index), source.read(head, index))
    for name in (table, head):
        if name in names:
            source.release(name)
    if not same:
        raise CheckpointError(
            f"{where}: the config ties the head to {table}, but the file holds another {head}; nothing was loaded. If "
            "the head is meant to be its own, set tie_word_embeddings to false in config.json."
        )
    return (head,)

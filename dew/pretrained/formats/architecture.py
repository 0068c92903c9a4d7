"""What a GGUF architecture states about itself: its metadata as a Hugging Face config, and where its tensors go.

Entry points: `GgufArchitecture`, `GgufFields`; the parts that Llama and its descendants share are `decoder_fields`,
`DECODER_TENSORS` and `DECODER_LAYER_TENSORS`.
"""

import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dew.pretrained.families.fields import MAX_LAYERS
from dew.pretrained.families.rotary import longrope_factor
from dew.pretrained.gguf import GgufFile
from dew.pretrained.source import CheckpointError
from dew.tree import matches

DECODER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
DECODER_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQUENCIES = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# Fields that change nothing at this value, in any architecture.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.original_context_length": (0,),
    "rope.scaling.finetuned": (False, True),  # whether the scaling was trained with, which changes no result
    "attention.causal": (True,),
}
TINY, HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""Positive numbers that float32 holds."""
_TOKENS = (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id"))


class GgufFields:
    """The fields of one architecture in a file's metadata; it remembers which were read."""

    def __init__(self, file: GgufFile, architecture: str):
        self.file, self.architecture, self.where = file, architecture, file.path
        self.values = {
            key.removeprefix(f"{architecture}."): value
            for key, value in file.metadata.items()
            if key.startswith(f"{architecture}.")
        }
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Read a field as it is."""
        self._read.add(key)
        return self.values.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Read a positive whole number.

        Raises:
            CheckpointError: If it is absent without a default, or is none.
        """
        if default is None and key not in self.values:
            raise CheckpointError(f"{self.where}: the metadata lacks {self.architecture}.{key}.")
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise CheckpointError(
                f"{self.where}: {self.architecture}.{key} must be a positive whole number. Received: {shortened(value)}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive number, as the decimal that was meant: float32 reads 1e-05 as 9.999999747378752e-06.

        Raises:
            CheckpointError: If it is absent without a default, or is none.
        """
        if default is None and key not in self.values:
            raise CheckpointError(f"{self.where}: the metadata lacks {self.architecture}.{key}.")
        value = self.get(key, default)
        if type(value) not in (int, float) or not TINY <= value <= HUGE:
            raise CheckpointError(
                f"{self.where}: {self.architecture}.{key}: expected a positive number. Received: {shortened(value)}"
            )
        return float(str(np.float32(value)))

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of this GGUF name."""
        return name in self.file.tensors

    def finish(self, neutral: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Refuse fields that were not read and may change the computation.

        Args:
            neutral: Values at which further fields change nothing.

        Raises:
            CheckpointError: Naming the fields.
        """
        known = {**_NEUTRAL, **(neutral or {})}
        unknown = [
            f"{self.architecture}.{key}={shortened(value)}"
            for key, value in self.values.items()
            if key not in self._read and value not in known.get(key, ())
        ]
        if unknown:
            raise CheckpointError(
                f"{self.where}: these fields may change the computation and are not supported: {', '.join(unknown)}"
            )


def shortened(value: Any) -> str:
    """Show a value of the metadata in an error; it may be an array of millions."""
    return reprlib.repr(value)


def as_stored(name: str, num_rows: int, config: dict[str, Any]) -> np.ndarray | None:
    """Order of rows of an architecture that stores them as Hugging Face does: None."""
    return None


def rotated_neighbours(name: str, num_rows: int, config: dict[str, Any]) -> np.ndarray | None:
    """Stored row that holds each Hugging Face row of a query or key projection; None for other tensors.

    llama.cpp rotates neighbouring rows (2j, 2j+1) of a head, Hugging Face rotates (j, j + H/2). For some
    architectures its converter permutes the rows accordingly; this undoes it.

    Args:
        name: Hugging Face name.
        num_rows: Rows of the tensor.
        config: What `GgufArchitecture.config` returned.

    Raises:
        CheckpointError: If the rows are not whole heads.
    """
    if not re.search(r"self_attn\.[qk]_proj\.", name):
        return None
    half = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2
    if half < 1 or num_rows % (2 * half):
        raise CheckpointError(f"Tensor {name!r} has {num_rows} rows, which are not whole heads of {2 * half}.")
    # Hugging Face row (head, side, pair) is stored at (head, pair, side).
    return np.arange(num_rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufArchitecture:
    """One architecture.

    Attributes:
        name: As `general.architecture` says.
        translate: Metadata to the fields of a Hugging Face config; refuses what it does not understand.
        tensors: Stem of a GGUF name to that of a Hugging Face name.
        layer_tensors: The same below `blk.N.`; the Hugging Face stem goes below `layer_prefix`.
        layer_prefix: What a layer is called; `{i}` stands for its number.
        row_order: Hugging Face name, number of rows and config to the stored row of each row; None where they agree.
        shifted: Globs of Hugging Face names of which the file holds the values plus one.
        transposed: Globs of Hugging Face names that the file holds transposed.
    """

    name: str
    translate: Callable[[GgufFields], dict[str, Any]]
    tensors: Mapping[str, str] = dataclasses.field(default_factory=lambda: DECODER_TENSORS)
    layer_tensors: Mapping[str, str] = dataclasses.field(default_factory=lambda: DECODER_LAYER_TENSORS)
    layer_prefix: str = "model.layers.{i}."
    row_order: Callable[[str, int, dict[str, Any]], np.ndarray | None] = as_stored
    shifted: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()

    def config(self, file: GgufFile) -> dict[str, Any]:
        """Translate the metadata of a file.

        Raises:
            CheckpointError: If a field is missing, of the wrong type, or changes the computation in a way that is not
                read.
        """
        tokens = {
            name: value
            for key, name in _TOKENS
            if (value := file.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None
        }
        wrong = {name: shortened(value) for name, value in tokens.items() if type(value) is not int}
        if wrong:
            raise CheckpointError(f"{file.path}: token ids must be whole numbers. Received: {wrong}")
        return {**self.translate(GgufFields(file, self.name)), **tokens}

    def tensor_name(self, name: str) -> str:
        """Hugging Face name of a GGUF tensor; a name that is not known comes back unchanged."""
        stem, _, suffix = name.rpartition(".")
        if stem in self.tensors:
            return f"{self.tensors[stem]}.{suffix}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match and match[2] in self.layer_tensors:
            return f"{self.layer_prefix.replace('{i}', match[1])}{self.layer_tensors[match[2]]}.{suffix}"
        return name

    def is_shifted(self, name: str) -> bool:
        """Whether the file holds this tensor's values plus one."""
        return matches(name, self.shifted)

    def is_transposed(self, name: str) -> bool:
        """Whether the file holds this tensor transposed."""
        return matches(name, self.transposed)

    def consumed(self, config: dict[str, Any]) -> tuple[str, ...]:
        """Tensors of the file that the config already says."""
        rotary = config.get("rope_parameters", {})
        tables = {"llama3": (FREQUENCIES,), "longrope": (LONG_FACTORS, SHORT_FACTORS)}
        return tables.get(rotary.get("full_attention", rotary).get("rope_type"), ())


def decoder_fields(
    fields: GgufFields,
    *,
    head_dim: int | None = None,
    theta: float = 10000.0,
    partial: bool = False,
    layer_norm: str | None = None,
) -> dict[str, Any]:
    """Read what Llama and its descendants share.

    Args:
        fields: The metadata.
        head_dim: Width of a head where the metadata does not say; None divides the width by the heads.
        theta: Base of the rotation where the metadata does not say.
        partial: Whether `rope.dimension_count` may be less than a head; the part is then stated.
        layer_norm: Config field of the epsilon in an architecture with layer norms; None reads that of rms norms.

    Raises:
        CheckpointError: If a field is missing, of the wrong type, or not supported.
    """
    shared = plain_fields(fields)
    heads, width = shared["num_attention_heads"], shared["hidden_size"]
    default = max(1, width // heads) if head_dim is None else head_dim
    rotated = fields.count("rope.dimension_count", default)
    head_dim = fields.count("attention.key_length", default if partial else rotated)
    if fields.count("attention.value_length", head_dim) != head_dim or (rotated != head_dim and not partial):
        raise CheckpointError(
            f"{fields.where}: rope.dimension_count={rotated}, attention.key_length={head_dim} and "
            f"attention.value_length={fields.get('attention.value_length', head_dim)} differ; heads that rotate in "
            f"part are not supported for {fields.architecture}."
        )
    if rotated > head_dim:
        raise CheckpointError(f"{fields.where}: rope.dimension_count={rotated} exceeds the {head_dim} of a head.")
    eps = f"attention.layer_norm_{'rms_' if layer_norm is None else ''}epsilon"
    rotary = rope_parameters(fields, rotated, theta, shared["max_position_embeddings"])
    return {
        **shared,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        layer_norm or "rms_norm_eps": fields.number(eps),
        "rope_parameters": {**rotary, "partial_rotary_factor": rotated / head_dim} if partial else rotary,
    }


def pop_implied_head_dim(fields: GgufFields, shared: dict[str, Any]) -> int:
    """Take the width of a head out of the shared fields, for a config that cannot state it.

    Raises:
        CheckpointError: If it is not the width of the model divided by the heads.
    """
    head_dim, heads, width = shared.pop("head_dim"), shared["num_attention_heads"], shared["hidden_size"]
    if head_dim * heads != width:
        raise CheckpointError(
            f"{fields.where}: heads of {head_dim} are not the width {width} divided by {heads}, which a config of this "
            "architecture cannot express."
        )
    return head_dim


def plain_fields(fields: GgufFields) -> dict[str, Any]:
    """Read the sizes that every decoder has.

    Raises:
        CheckpointError: If one is missing or of the wrong type.
    """
    tokens = fields.file.metadata.get("tokenizer.ggml.tokens")
    num_layers = fields.count("block_count")
    if num_layers > MAX_LAYERS:
        raise CheckpointError(f"{fields.where}: block_count={num_layers}; at most {MAX_LAYERS} layers are read.")
    return {
        "num_hidden_layers": num_layers,
        "max_position_embeddings": fields.count("context_length"),
        "hidden_size": fields.count("embedding_length"),
        "intermediate_size": fields.count("feed_forward_length"),
        "num_attention_heads": fields.count("attention.head_count"),
        "vocab_size": fields.count("vocab_size", len(tokens) if isinstance(tokens, list) and tokens else None),
        "tie_word_embeddings": not fields.has_tensor("output.weight"),
    }


def layer_kinds(fields: GgufFields, num_layers: int, period: int) -> list[str]:
    """Read which layers have the window: a flag for each, or a period whose last layer has none.

    Args:
        fields: The metadata.
        num_layers: How many there are.
        period: What it is where the metadata says nothing.

    Raises:
        CheckpointError: If the metadata says something else.
    """
    pattern = fields.get("attention.sliding_window_pattern", period)
    if type(pattern) is int and 0 < pattern < 2**31:
        pattern = [bool((layer + 1) % pattern) for layer in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) != num_layers or not all(each in (0, 1) for each in pattern):
        raise CheckpointError(
            f"{fields.where}: {fields.architecture}.attention.sliding_window_pattern must be a period or a flag for "
            f"each of {num_layers} layers. Received: {shortened(pattern)}"
        )
    return ["sliding_attention" if each else "full_attention" for each in pattern]


def rope_parameters(fields: GgufFields, rotated: int, theta: float, max_length: int) -> dict[str, Any]:
    """Read how positions rotate.

    Args:
        fields: The metadata.
        rotated: Rotated dimensions of a head.
        theta: Base where the metadata does not say.
        max_length: Longest context in tokens.

    Raises:
        CheckpointError: If the scaling is not known, or its tables are damaged.
    """
    theta = fields.number("rope.freq_base", theta)
    kind = fields.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise CheckpointError(
            f"{fields.where}: {fields.architecture}.rope.scaling.type={kind!r} is not supported; known: none, linear, "
            "yarn, longrope."
        )
    default = {"rope_type": "default", "rope_theta": theta}
    if fields.has_tensor(FREQUENCIES):
        found = _llama3_scaling(fields.file.floats(FREQUENCIES), theta, rotated) if kind == "none" else None
        return found or default  # a table that is none of these is then left over, and refused by its name
    if kind == "longrope" or (kind == "none" and fields.has_tensor(LONG_FACTORS)):
        return {"rope_type": "longrope", "rope_theta": theta, **_longrope_fields(fields, rotated, max_length)}
    if kind == "yarn":
        fast, slow = (
            fields.number(f"rope.scaling.yarn_beta_{name}", value) for name, value in (("fast", 32.0), ("slow", 1.0))
        )
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": fields.number("rope.scaling.factor"),
            "original_max_position_embeddings": fields.count("rope.scaling.original_context_length"),
            **{
                name: value
                for name, value, usual in (("beta_fast", fast, 32.0), ("beta_slow", slow, 1.0))
                if value != usual
            },
        }
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": fields.number("rope.scaling.factor")}
    return default


def _longrope_fields(fields: GgufFields, rotated: int, max_length: int) -> dict[str, Any]:
    """Read the two tables of factors, and the factor on cos and sin where it is not the one that the contexts imply."""
    factors = {}
    for name, tensor in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        if not fields.has_tensor(tensor) or fields.file.tensors[tensor].shape != (rotated // 2,):
            raise CheckpointError(
                f"{fields.where}: longrope needs {tensor!r} with {rotated // 2} factors, one for a pair of dimensions."
            )
        factors[name] = [float(str(each)) for each in fields.file.floats(tensor)]
    original = fields.count("rope.scaling.original_context_length")
    implied = longrope_factor(max_length / original, original)
    stated = fields.number("rope.scaling.attn_factor", implied)
    own = {} if math.isclose(stated, implied, rel_tol=1e-6) else {"attention_factor": stated}
    return {**factors, "original_max_position_embeddings": original, **own}


def _llama3_scaling(table: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Find the published Llama 3 scaling whose divisors of the frequencies are this table."""
    if table.shape != (-(-head_dim // 2),):  # before a table of the stated width is made
        return None
    for factor in (8.0, 32.0):
        parameters = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        original = 8192
        turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
        smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        divisors = 1.0 / ((1.0 - smooth) / factor + smooth)
        if np.allclose(table, divisors, rtol=1e-5):
            scaling = {**parameters, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "rope_theta": theta, **scaling}
    return None

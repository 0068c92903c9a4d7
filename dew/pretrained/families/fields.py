"""Reads a Hugging Face config field by field, and refuses what was not read and may change the computation.

Entry point: `Fields`.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from dew.pretrained.source import CheckpointError

# Fields of any config that do not change what a forward pass computes.
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_range is_decoder
    is_encoder_decoder is_llama_config label2id length_penalty max_length max_sequence_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 - a list of seventy literals reads worse
)
# Fields of any config that change nothing at these values.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "attention_dropout": (0, 0.0, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "tie_encoder_decoder": (False, None),
}
MAX_LAYERS = 4096
MAX_PREDICTION_LAYERS = 16
"""More layers than any model has; a list of them is made before anything else shows that a number is absurd."""
_MISSING = object()


class Fields:
    """A config that remembers which of its fields were read."""

    def __init__(self, config: Mapping[str, Any], where: object):
        """Wrap a config.

        Args:
            config: The parsed config.json.
            where: The checkpoint, for errors.
        """
        self.config, self.where = config, where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = _MISSING) -> Any:
        """Read a field; null counts as absent."""
        self._read.add(name)
        value = self.config.get(name)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.where}: the config lacks {name!r}.")
            return default
        return value

    def count(self, name: str, default: Any = _MISSING, *, least: int = 1) -> int:
        """Read a positive whole number, or 0 where that is the least allowed."""
        value = self.get(name, default)
        if type(value) is not int or not least <= value < 2**31:
            kind = "positive whole number" if least else "whole number of 0 or more"
            raise CheckpointError(f"{self.where}: {name} must be a {kind}. Received: {name}={value!r}")
        return value

    def optional_count(self, name: str, default: int | None) -> int | None:
        """Read a positive whole number that null switches off; only an absent field takes the default."""
        self._read.add(name)
        return self.count(name) if self.config.get(name) is not None else None if name in self.config else default

    def optional_number(self, name: str, default: float | None) -> float | None:
        """Read a positive number that null switches off; only an absent field takes the default."""
        self._read.add(name)
        return self.number(name) if self.config.get(name) is not None else None if name in self.config else default

    def number(self, name: str, default: Any = _MISSING) -> float:
        """Read a positive finite number."""
        return positive(self.get(name, default), name, self.where)

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        """Read true or false."""
        value = self.get(name, default)
        if type(value) is not bool:
            raise CheckpointError(f"{self.where}: {name} must be true or false. Received: {name}={value!r}")
        return value

    def rate(self, name: str, default: float = 0.0) -> float:
        """Read a rate of dropout, from 0 up to 1."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise CheckpointError(f"{self.where}: {name} must be from 0 up to 1. Received: {name}={value!r}")
        return float(value)

    def choice(self, name: str, choices: Mapping[str, Any], default: Any = _MISSING) -> Any:
        """Read a name and return what `choices` holds for it."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in choices:
            known = ", ".join(choices)
            raise CheckpointError(f"{self.where}: {name}={value!r} is not supported; known: {known}.")
        return choices[value]

    def finish(self, neutral: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Refuse every field that was not read, is not inert and is not at a value that changes nothing.

        Args:
            neutral: Further fields of the family with the values that change nothing.

        Raises:
            CheckpointError: Naming the fields.
        """
        allowed = {**NEUTRAL, **(neutral or {})}
        unknown = {
            name: value
            for name, value in self.config.items()
            if name not in self._read and name not in INERT and not _among(value, allowed.get(name, ()))
        }
        if unknown:
            listed = ", ".join(f"{name}={str(value)[:60]}" for name, value in sorted(unknown.items()))
            raise CheckpointError(
                f"{self.where}: these config fields may change the computation and are not supported: {listed}. If one "
                "changes nothing, remove it from config.json."
            )


def positive(value: Any, name: str, where: object) -> float:
    """Check a positive finite number."""
    # A whole number of JSON may be too long for a float.
    if type(value) not in (int, float) or not 0 < value < sys.float_info.max:
        raise CheckpointError(f"{where}: {name} must be a positive number. Received: {name}={repr(value)[:80]}")
    return float(value)


def _among(value: Any, values: Iterable[Any]) -> bool:
    # 0 == False in Python; a config that says false where a number belongs is not at its neutral value.
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)

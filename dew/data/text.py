"""A checkpoint's tokenizer: ids, special tokens and chats, read from a directory or from GGUF metadata.

Entry point: `Tokenizer`. It holds the one account of special tokens that training and generation
share, so a text never receives a second start token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from dew.data.byte_pairs import token_text, tokenizer_from_metadata
from dew.data.chat import ChatTemplate
from dew.data.template_budget import ChatTemplateError
from dew.data.tokenizers.directory import read_backend
from dew.data.tokenizers.files import read_json, read_text
from dew.data.tokenizers.gguf_pieces import pieces_from_metadata

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT_TEMPLATE, TOOLS_TEMPLATE = "default", "tool_use"


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to ids and back, with the chat template of the checkpoint.

    Attributes:
        backend: The `tokenizers.Tokenizer` that does the work; it adds the special tokens.
        special_tokens: Texts by name (`bos_token`, `eos_token`, `pad_token`, ...).
        chat_template: Jinja source, or None for a model without chats.
        named_templates: Further templates by name; `tool_use` is taken for chats with tools.
        config: What `tokenizer_config.json` holds, kept for `save`.
        end_of_turn: Text of a further token that ends an answer, or None.
    """

    backend: Backend
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    end_of_turn: str | None = None

    def __post_init__(self) -> None:
        for name, text in self.special_tokens.items():
            if self.backend.token_to_id(text) is None:
                raise ValueError(
                    f"The tokenizer's {name} is {text!r}, which is not in its vocabulary. "
                    "tokenizer_config.json and tokenizer.json belong to different models."
                )

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face checkpoint directory.

        Args:
            directory: Holds `tokenizer.json`, or a vocabulary in one of the older formats (a SentencePiece or tiktoken
                `tokenizer.model`, `vocab.json` with `merges.txt`), and optionally `tokenizer_config.json`,
                `special_tokens_map.json`, `added_tokens.json` and `chat_template.jinja`.

        Returns:
            The tokenizer.

        Raises:
            FileNotFoundError: If there is no vocabulary.
            ValueError: If a file is malformed or the files do not fit together.
        """
        directory = Path(directory)
        config = read_json(directory / "tokenizer_config.json")
        named = {**read_json(directory / "special_tokens_map.json"), **config}
        special = {name: _text(named[name], name, directory) for name in _NAMED_TOKENS if named.get(name)}
        backend = read_backend(directory, config, special, _further_special(named, directory))
        templates = _read_templates(directory, config)
        return cls(
            backend=backend,
            special_tokens=special,
            chat_template=templates.pop(DEFAULT_TEMPLATE, None),
            named_templates=templates,
            config=config,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file carries.

        Args:
            metadata: The file's keys and values.

        Returns:
            The tokenizer; its ids equal those of the checkpoint's own tokenizer.json.

        Raises:
            ValueError: If a key is missing, damaged, or names a tokenizer that is not read.
        """
        is_pieces = metadata.get("tokenizer.ggml.model") == "llama"
        backend = pieces_from_metadata(metadata) if is_pieces else tokenizer_from_metadata(metadata)
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        found = {name: token_text(metadata, short) for name, short in names.items()}
        special = {name: text for name, text in found.items() if text is not None}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        architecture = metadata.get("general.architecture")
        if f"{architecture}.context_length" in metadata:
            config["model_max_length"] = int(metadata[f"{architecture}.context_length"])
        template = metadata.get("tokenizer.chat_template")
        return cls(
            backend=backend,
            special_tokens=special,
            chat_template=None if template is None else str(template),
            config={**config, **special},
            end_of_turn=token_text(metadata, "eot"),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that starts a text, or None."""
        return self._id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text, or None."""
        return self._id("eos_token")

    @property
    def pad_id(self) -> int:
        """Id that fills rows; masks, never this id, say which tokens are padding."""
        pad = self._id("pad_token")
        if pad is None:
            pad = self.eos_id
        return 0 if pad is None else pad

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids after which an answer is complete."""
        turn = None if self.end_of_turn is None else self.backend.token_to_id(self.end_of_turn)
        return tuple(dict.fromkeys(number for number in (self.eos_id, turn) if number is not None))

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn a text into ids.

        Args:
            text: Any text; the special tokens written in it are recognised.
            add_special_tokens: Add what the checkpoint puts around a text. A text that already
                starts with the start token does not receive a second one.

        Returns:
            The ids.

        Raises:
            TypeError: If `text` is not a str.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Turn texts into ids on all cores; see `encode`.

        Args:
            texts: The texts.
            add_special_tokens: See `encode`.

        Returns:
            One list of ids for each text.

        Raises:
            TypeError: If one of them is not a str.
        """
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"A text must be a str. Received: {type(text).__name__} {text!r}")
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        rows = [list(encoding.ids) for encoding in encoded]
        bos = self.bos_id
        if add_special_tokens and bos is not None:
            start = self.special_tokens["bos_token"]
            rows = [
                ids[1:] if ids[:2] == [bos, bos] and text.startswith(start) else ids
                for ids, text in zip(rows, texts, strict=True)
            ]
        return rows

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text.

        Args:
            ids: Token ids; a NumPy array will do.
            skip_special_tokens: Leave the special tokens out.

        Returns:
            The text.

        Raises:
            ValueError: If an id lies outside the vocabulary.
        """
        numbers = [int(number) for number in ids]
        for number in numbers:
            if not 0 <= number < self.vocab_size:
                raise ValueError(f"Token ids lie in [0, {self.vocab_size}). Received: {number}")
        return self.backend.decode(numbers, skip_special_tokens=skip_special_tokens)

    def chat_text(self, messages: Any, *, add_generation_prompt: bool = True, tools: Any = None) -> str:
        """Write a chat with the checkpoint's template.

        Args:
            messages: Mappings with `role` and `content`.
            add_generation_prompt: End with the opening of an assistant's turn.
            tools: Descriptions of functions that the model may call, as JSON values; None for a chat without.

        Returns:
            The text, special tokens included.

        Raises:
            ValueError: If there is no template, or it refuses the chat.
            TypeError: If a message is malformed.
        """
        return self._template(tools).render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def chat(self, messages: Any, *, add_generation_prompt: bool = True, tools: Any = None) -> list[int]:
        """Turn a chat into the ids to generate from.

        Args:
            messages: Mappings with `role` and `content`.
            add_generation_prompt: End with the opening of an assistant's turn.
            tools: Descriptions of functions that the model may call, as JSON values; None for a chat without.

        Returns:
            The ids; every special token in them comes from the template.

        Raises:
            ValueError: If there is no template, or it refuses the chat.
            TypeError: If a message is malformed.
        """
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self.encode(text, add_special_tokens=False)

    def chat_mask(self, messages: Any) -> tuple[list[int], list[bool]]:
        """Turn a whole chat into ids and mark what the assistant wrote.

        Args:
            messages: Mappings with `role` and `content`.

        Returns:
            The ids, and True for each token that holds text of an answer or ends its turn.

        Raises:
            ValueError: If there is no template, it refuses the chat, or it rewrites answers.
            TypeError: If a message is malformed.
        """
        text, spans = self._template().assistant_spans(messages)
        encoding = self.backend.encode(text, add_special_tokens=False)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(encoding.ids), bool)
        for start, end in spans:
            mask |= (begins < end) & (ends > start)
        return list(encoding.ids), mask.tolist()

    def _template(self, tools: Any = None) -> ChatTemplate:
        source = self.chat_template if tools is None else self.named_templates.get(TOOLS_TEMPLATE, self.chat_template)
        if source is None:
            raise ChatTemplateError(
                "this tokenizer has no chat template, so it takes texts and no chats. "
                "Use an instruction-tuned checkpoint, or write the chat as one text."
            )
        special = [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]
        return ChatTemplate(
            source=source,
            special_tokens=self.special_tokens,
            closing_tokens=frozenset([*special, *self.special_tokens.values()]),
        )

    def vocab_hash(self) -> str:
        """Fingerprint what decides the ids: vocabulary, merges, cutting and special tokens.

        Returns:
            64 hexadecimal digits.
        """
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def save(self, directory: str | Path) -> None:
        """Write the files that transformers and `from_directory` read.

        Args:
            directory: An existing directory; receives `tokenizer.json`,
                `tokenizer_config.json` and, with a template, `chat_template.jinja`.
        """
        directory = Path(directory)
        self.backend.save(str(directory / "tokenizer.json"))
        config = {key: value for key, value in self.config.items() if key != "chat_template"}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config, **self._missing_from(config)}
        if self.named_templates:
            named = {DEFAULT_TEMPLATE: self.chat_template, **self.named_templates}
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in named.items() if text is not None
            ]
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if self.chat_template is not None and not self.named_templates:
            (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8", newline="")

    def _missing_from(self, config: Mapping[str, Any]) -> dict[str, str]:
        return {name: text for name, text in self.special_tokens.items() if not config.get(name)}


def _text(token: Any, name: str, directory: Path) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str) or not text:
        raise ValueError(
            f"{directory}: {name} must be a text, or an object with its text. Received: {str(token)[:80]!r}"
        )
    return text


def _further_special(named: Mapping[str, Any], directory: Path) -> list[str]:
    """Texts of the special tokens that have no name of their own."""
    found: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = named.get(name) or ()
        if not isinstance(tokens, list | tuple | Mapping):
            raise ValueError(f"{directory}: {name} must be a list. Received: {str(tokens)[:80]!r}")
        values = tokens.values() if isinstance(tokens, Mapping) else tokens
        found += [_text(token, name, directory) for token in values]
    return found


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Find the chat templates by name: a file of its own first, then what the config says."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return {DEFAULT_TEMPLATE: read_text(path)}
    template = read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if template is None:
        return {}
    entries = template if isinstance(template, list) else [{"name": DEFAULT_TEMPLATE, "template": template}]
    named: dict[Any, Any] = {e.get("name"): e.get("template") for e in entries if isinstance(e, Mapping)}
    if len(named) != len(entries) or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ValueError(
            f"{directory}: chat_template must be a text, or a list of different names with their texts. "
            f"Received: {str(template)[:80]!r}"
        )
    return named

"""Finds the vocabulary of a checkpoint directory, in whichever format it is, and adds its special tokens.

Entry points: `read_backend`, `has_tokenizer`. Where several formats lie side by side, `tokenizer.json` is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from dew.data.tokenizers.files import MAX_TOKENS, read_bytes, read_json, read_text, refusing_panics
from dew.data.tokenizers.ranked_bytes import merges_backend, ranks_backend
from dew.data.tokenizers.sentencepiece import parse_model, sentencepiece_backend
from dew.data.tokenizers.tokenizer_json import read_tokenizer_json

SLOW_TOKENIZER_FILES = ("tokenizer.model", "tiktoken.model", "qwen.tiktoken", "vocab.json", "merges.txt")
"""Read, in this order, where there is no tokenizer.json."""
# Class in tokenizer_config.json to the way its text is cut.
_MERGES_RULES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_PIECES_CUT_FIRST = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


def has_tokenizer(directory: Path) -> bool:
    """Tell whether a directory holds a vocabulary in a format that is read."""
    names = ("tokenizer.json", *SLOW_TOKENIZER_FILES[:3])
    return any((directory / name).exists() for name in names) or _has_merges(directory)


def read_backend(
    directory: Path, config: Mapping[str, Any], named: Mapping[str, str], special: Sequence[str] = ()
) -> Backend:
    """Read the vocabulary of a directory.

    Args:
        directory: Of the checkpoint.
        config: What its tokenizer_config.json holds.
        named: Text of its special tokens by name, such as `bos_token`.
        special: Texts of its special tokens without a name.

    Returns:
        The tokenizer; it puts around a text what the config asks for.

    Raises:
        FileNotFoundError: If no format is there.
        ValueError: If a file is malformed, or the files do not fit together.
    """
    all_special = {*named.values(), *special}
    declared = _declared_tokens(directory, config, all_special)
    path = directory / "tokenizer.json"
    if path.exists():
        backend = read_tokenizer_json(path)
    else:
        backend = _read_slow(directory, config, declared)
    _add_tokens(backend, directory, declared, all_special)
    _set_ends(backend, config, named, directory)
    return backend


def _read_slow(directory: Path, config: Mapping[str, Any], declared: Mapping[int, AddedToken]) -> Backend:
    name = _class_name(config)
    for file_name, rule in (
        ("tokenizer.model", "llama-bpe"),
        ("tiktoken.model", "llama-bpe"),
        ("qwen.tiktoken", "qwen2"),
    ):
        path = directory / file_name
        if not path.exists():
            continue
        data = read_bytes(path)
        if file_name == "tokenizer.model" and not _is_ranks(data):
            cut_first = name in _PIECES_CUT_FIRST
            legacy = config.get("legacy", not cut_first)
            prefix = "first" if legacy is False else "always"
            return sentencepiece_backend(parse_model(data, path), path, prefix=prefix, whole_pieces=cut_first)
        texts = {number: token.content for number, token in declared.items()}
        return ranks_backend(data, path, rule, texts)
    if not _has_merges(directory):
        raise FileNotFoundError(
            f"{directory} holds no tokenizer.json and none of {', '.join(SLOW_TOKENIZER_FILES)}. Save its tokenizer "
            "there with the tool that made the checkpoint."
        )
    if name is not None and name not in _MERGES_RULES:
        raise ValueError(
            f"{directory}: tokenizer_class={config['tokenizer_class']!r} is not supported without a "
            f"tokenizer.json; known for vocab.json and merges.txt: {', '.join(_MERGES_RULES)}. Save the tokenizer as "
            "tokenizer.json."
        )
    return merges_backend(
        read_json(directory / "vocab.json"),
        read_text(directory / "merges.txt"),
        directory,
        _MERGES_RULES[name or "GPT2Tokenizer"],
        add_prefix_space=config.get("add_prefix_space") is True,
    )


def _class_name(config: Mapping[str, Any]) -> str | None:
    name = config.get("tokenizer_class")
    return None if name is None else str(name).removesuffix("Fast")


def _has_merges(directory: Path) -> bool:
    return all((directory / name).exists() for name in ("vocab.json", "merges.txt"))


def _is_ranks(data: bytes) -> bool:
    """Tell base64 lines from a protobuf, which starts with a line feed: the tag of its first piece."""
    first = data.split(b"\n", 1)[0].split()
    return len(first) == 2 and first[1].isdigit()


def _declared_tokens(directory: Path, config: Mapping[str, Any], special: Collection[str]) -> dict[int, AddedToken]:
    """Added tokens by id, of tokenizer_config.json and the older added_tokens.json."""
    found: dict[int, AddedToken] = {}
    for text, number in read_json(directory / "added_tokens.json").items():
        found[_token_id(number, directory)] = AddedToken(text, special=text in special, normalized=text not in special)
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, Mapping):
        raise ValueError(f"{directory}: added_tokens_decoder must be an object. Received: {type(entries).__name__}")
    for number, entry in entries.items():
        if isinstance(entry, str):
            entry = {"content": entry}
        if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str) or not entry["content"]:
            raise ValueError(f"{directory}: added token {number} has no 'content'. Received: {str(entry)[:80]}")
        flags = {
            name: bool(entry[name])
            for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
            if name in entry
        }
        found[_token_id(number, directory)] = AddedToken(entry["content"], **flags)
    return dict(sorted(found.items()))


def _token_id(number: Any, directory: Path) -> int:
    if isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 10:
        number = int(number)
    if type(number) is not int or not 0 <= number < MAX_TOKENS:
        raise ValueError(
            f"{directory}: the id of an added token must be a whole number. Received: {str(number)[:40]!r}"
        )
    return number


def _add_tokens(
    backend: Backend, directory: Path, declared: Mapping[int, AddedToken], special: Collection[str]
) -> None:
    """Add the declared tokens, and mark as special what the checkpoint names so."""
    known = backend.get_added_tokens_decoder()
    for number, token in declared.items():
        if token.content in special:
            token.special = True
        if number in known and known[number].content == token.content:
            continue
        with refusing_panics(directory):
            backend.add_tokens([token])
        got = backend.token_to_id(token.content)
        if got != number:
            raise ValueError(
                f"{directory} declares the token {token.content!r} with id {number}, but its vocabulary gives it {got}"
                ". The files belong to different models."
            )
    present = [text for text in sorted(special) if backend.token_to_id(text) is not None]
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([text for text in present if text not in marked])


def _set_ends(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str], directory: Path) -> None:
    """Put around a text what the config says, where it says so; else what tokenizer.json says."""
    flags = [config.get(name) for name in ("add_bos_token", "add_eos_token")]
    if flags == [None, None]:
        return
    for name, flag in zip(("add_bos_token", "add_eos_token"), flags, strict=True):
        if flag is not None and type(flag) is not bool:
            raise ValueError(f"{directory}: {name} must be true or false. Received: {name}={flag!r}")
    bos, eos = (named.get(name) if flag else None for name, flag in zip(("bos_token", "eos_token"), flags, strict=True))
    ends = {text: backend.token_to_id(text) for text in (bos, eos) if text is not None}
    if None in ends.values():
        return  # the tokenizer that holds this refuses a named token outside of its vocabulary
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])], special_tokens=list(ends.items())
    )

"""A byte-level BPE tokenizer from the metadata of a GGUF file.

GGUF stores the vocabulary and the merges, and only a name for the way text is cut before merging;
`PRE_TOKENIZERS` says what each name means. Entry point: `tokenizer_from_metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

# The cutting patterns of the published tokenizer.json files of Llama 3 and Qwen 2.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class _PreTokenizer:
    cut: Callable[[], Any]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False  # when the file does not say


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _pattern(numbers: str) -> Callable[[], Any]:
    def cut() -> Any:
        split = pre_tokenizers.Split(Regex(_WORDS % numbers), behavior="isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, whole])

    return cut


PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "gpt-2": _PreTokenizer(cut=_byte_level),
    "phi-2": _PreTokenizer(cut=_byte_level),
    "smollm": _PreTokenizer(cut=_single_digits),
    "starcoder": _PreTokenizer(cut=_single_digits),
    "refact": _PreTokenizer(cut=_single_digits),
    "llama-bpe": _PreTokenizer(cut=_pattern(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True),
    "qwen2": _PreTokenizer(cut=_pattern(r"\p{N}"), nfc=True),
    "deepseek-r1-qwen": _PreTokenizer(cut=_pattern(r"\p{N}"), nfc=True),
}


def field(metadata: Mapping[str, Any], name: str) -> Any:
    """Look up `tokenizer.ggml.NAME`.

    Raises:
        ValueError: If the file has no such key.
    """
    try:
        return metadata[f"tokenizer.ggml.{name}"]
    except KeyError:
        raise ValueError(
            f"The GGUF metadata has no tokenizer.ggml.{name}. Use a file that carries its "
            "tokenizer, or load a directory with a tokenizer.json."
        ) from None


def _merges(lines: list[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if not right or left + right not in vocabulary:
            raise ValueError(
                f"tokenizer.ggml.merges holds {line!r}, which does not join two tokens into a "
                "third. The file is damaged; fetch it again."
            )
        merges.append((left, right))
    return merges


def token_text(metadata: Mapping[str, Any], name: str) -> str | None:
    """Look up the text of a special token.

    Args:
        metadata: The GGUF file's keys and values.
        name: `bos`, `eos`, `eot`, `unknown` or `padding`.

    Returns:
        The token's text, or None if the file names no such token.

    Raises:
        ValueError: If the id lies outside the vocabulary.
    """
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    tokens = field(metadata, "tokens")
    if not 0 <= int(index) < len(tokens):
        raise ValueError(f"tokenizer.ggml.{name}_token_id is {index}, outside the vocabulary of {len(tokens)}.")
    return str(tokens[int(index)])


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Backend:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: The file's keys and values; only `tokenizer.ggml.*` is read.

    Returns:
        A `tokenizers.Tokenizer` that gives the ids of the checkpoint's own tokenizer.json.

    Raises:
        ValueError: If a key is missing, the tokenizer is not a byte-level BPE, the name of its
            pre-tokenizer is unknown, or the vocabulary and merges do not fit together.
    """
    kind = field(metadata, "model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) are read. "
            "Load the checkpoint's directory with its tokenizer.json instead."
        )
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Load the checkpoint's directory with its tokenizer.json instead."
        )
    rule = PRE_TOKENIZERS[name]
    tokens = [str(token) for token in field(metadata, "tokens")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.tokens repeats {len(tokens) - len(vocabulary)} of its "
            f"{len(tokens)} tokens. The file is damaged; fetch it again."
        )
    merges = _merges([str(line) for line in field(metadata, "merges")], vocabulary)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.cut()
    backend.decoder = decoders.ByteLevel()
    kinds = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())]
    if kinds and len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens.")
    marked = [pair for pair in zip(tokens, kinds, strict=False) if pair[1] in (CONTROL, USER_DEFINED)]
    backend.add_tokens([AddedToken(text, special=kind == CONTROL, normalized=False) for text, kind in marked])
    add_ends(backend, metadata, vocabulary, adds_bos=rule.adds_bos)
    return backend


def add_ends(backend: Backend, metadata: Mapping[str, Any], vocabulary: Mapping[str, int], *, adds_bos: bool) -> None:
    """Put the start and end tokens that the file asks for around every text.

    Args:
        backend: The tokenizer.
        metadata: The GGUF file's keys and values.
        vocabulary: Token to id.
        adds_bos: Whether a text starts with the start token when the file does not say.
    """
    bos = token_text(metadata, "bos")
    eos = token_text(metadata, "eos")
    with_bos = bos is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    with_eos = eos is not None and bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    if not (with_bos or with_eos):
        return
    single = [*([bos] if with_bos else []), "$A", *([eos] if with_eos else [])]
    used = [token for token in (bos, eos) if token is not None and token in single]
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(map(str, single)),
        special_tokens=[(token, vocabulary[token]) for token in used],
    )

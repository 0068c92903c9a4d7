"""Byte-level vocabularies: base64 ranks as tiktoken stores them, and vocab.json with merges.txt as GPT-2 does.

Entry points: `ranks_backend`, `merges_backend`. How text is cut before merging is not in these files; it follows from
the name of the file or of the tokenizer's class.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dew.data.byte_pairs import PRE_TOKENIZERS
from dew.data.tokenizers.files import MAX_TOKENS, refusing_panics

MAX_TOKEN_BYTES = 512
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _PLAIN]
BYTE_LETTERS = {byte: chr(byte) for byte in _PLAIN} | {byte: chr(256 + n) for n, byte in enumerate(_HIDDEN)}
"""The printable character that stands for each byte, as GPT-2 chose them."""


def ranks_backend(data: bytes, where: object, rule: str, reserved: Mapping[int, str]) -> Backend:
    """Build the tokenizer of a file of `base64 rank` lines.

    Args:
        data: The whole file.
        where: The file, for errors.
        rule: Name in `PRE_TOKENIZERS` of the way text is cut.
        reserved: Special tokens by id; an id between the last rank and the last of them that has none gets a name.

    Raises:
        ValueError: If a line, a rank or the set of ranks is not as it should be.
    """
    ranks = _ranks(data, where)
    letters = {token: "".join(BYTE_LETTERS[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        # Of several pairs that make one token, the one of the lowest ranks is merged first.
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    vocab = {letters[token]: rank for token, rank in ranks.items()}
    named = [(letters[left], letters[right]) for left, right in merges]
    backend = _byte_level(vocab, named, where, PRE_TOKENIZERS[rule].cut(), nfc=PRE_TOKENIZERS[rule].nfc, whole=True)
    last = max(reserved, default=-1)
    if last >= MAX_TOKENS:
        raise ValueError(f"{where}: a special token has id {last}; at most {MAX_TOKENS} tokens are read.")
    with refusing_panics(where):
        backend.add_special_tokens(
            [reserved.get(number, f"<|reserved_token_{number}|>") for number in range(len(ranks), last + 1)]
        )
    return backend


def merges_backend(
    vocabulary: Mapping[str, Any], merges: str, where: object, rule: str, *, add_prefix_space: bool
) -> Backend:
    """Build the tokenizer of a `vocab.json` and a `merges.txt`.

    Args:
        vocabulary: Token to id.
        merges: Text of merges.txt: pairs in the order in which they are merged.
        where: The directory, for errors.
        rule: Name in `PRE_TOKENIZERS` of the way text is cut.
        add_prefix_space: Whether a text gets a space before it.

    Raises:
        ValueError: If an id or a pair is not as it should be.
    """
    wrong = [
        (token, number)
        for token, number in vocabulary.items()
        if type(number) is not int or not 0 <= number < MAX_TOKENS
    ]
    if wrong or len(set(vocabulary.values())) != len(vocabulary):
        shown = wrong[0] if wrong else "one id twice"
        raise ValueError(f"{where}/vocab.json must give each token a whole number of its own. Received: {shown}")
    pairs = []
    for line in merges.splitlines():
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ValueError(f"{where}/merges.txt holds {line[:80]!r}, which does not join two tokens into a third.")
        pairs.append((left, right))
    cut = PRE_TOKENIZERS[rule].cut()
    if add_prefix_space:
        if rule != "gpt-2":
            raise ValueError(f"{where}: add_prefix_space=true is supported for GPT-2's tokenizer only.")
        cut = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _byte_level(dict(vocabulary), pairs, where, cut, nfc=PRE_TOKENIZERS[rule].nfc, whole=False)


def _byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], where: object, cut: Any, *, nfc: bool, whole: bool
) -> Backend:
    with refusing_panics(where):
        backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = cut
    backend.decoder = decoders.ByteLevel()
    return backend


def _ranks(data: bytes, where: object) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token, value = base64.b64decode(encoded, validate=True), int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{where}, line {number}: expected 'base64 rank'. Received: {line[:60]!r}") from error
        if not 0 < len(token) <= MAX_TOKEN_BYTES or token in ranks:
            raise ValueError(
                f"{where}, line {number}: a token has 1 to {MAX_TOKEN_BYTES} bytes and one line. Received: "
                f"{line[:60]!r}"
            )
        ranks[token] = value
    if not ranks or len(ranks) > MAX_TOKENS or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{where} must rank its {len(ranks)} tokens 0, 1, 2, ... without a gap.")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{where} has no token for the byte {missing[0]}, so not every text can be encoded.")
    return ranks

"""SentencePiece models: the protobuf of a `.model` file, and the tokenizer that its pieces describe.

Entry points: `parse_model`, `sentencepiece_backend`. Only the fields that decide ids are read, with every length
checked. Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dew.data.tokenizers.charsmap import check_charsmap
from dew.data.tokenizers.files import MAX_TOKENS, refusing_panics

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
MAX_PIECE_CHARACTERS = 512
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, kw_only=True)
class PieceModel:
    """What a SentencePiece model says.

    Attributes:
        pieces: (text, score, kind) by id.
        algorithm: `UNIGRAM` or `BPE`.
        byte_fallback: Whether characters without a piece become their bytes.
        unk_id: Id of the unknown piece.
        charsmap: Precompiled normalisation, or nothing.
        add_dummy_prefix: Whether a text gets a space before it.
        remove_extra_whitespaces: Whether runs of spaces become one, and those at the ends none.
        escape_whitespaces: Whether spaces are written as U+2581 in the pieces.
    """

    pieces: Sequence[tuple[str, float, int]]
    algorithm: int = UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def parse_model(data: bytes, where: object) -> PieceModel:
    """Parse a `.model` file.

    Args:
        data: The whole file.
        where: The file, for errors.

    Raises:
        ValueError: If it is not a SentencePiece model, or is one that is not understood.
    """
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data, where):
        if number == 1:
            pieces.append(_piece(_expect(value, bytes, "a piece", where), where))
            if len(pieces) > MAX_TOKENS:
                raise ValueError(f"{where} has more than {MAX_TOKENS} pieces; the file is damaged.")
        elif number in (2, 3):
            message = dict(_fields(_expect(value, bytes, "a message", where), where))
            (trainer if number == 2 else normalizer).update(message)
    if not pieces:
        raise ValueError(f"{where} holds no pieces, so it is not a SentencePiece model.")
    if trainer.get(24):
        raise ValueError(f"{where} treats whitespace as a suffix, which is not supported.")
    algorithm = trainer.get(3, UNIGRAM)
    if algorithm not in (UNIGRAM, BPE):
        raise ValueError(f"{where} has model type {algorithm!r}; known are {UNIGRAM} (unigram) and {BPE} (BPE).")
    unk_id = trainer.get(40, 0)
    if not isinstance(unk_id, int) or not 0 <= unk_id < len(pieces):
        raise ValueError(f"{where} has unk_id {unk_id!r}, outside of its {len(pieces)} pieces.")
    charsmap = _expect(normalizer.get(2, b""), bytes, "precompiled_charsmap", where)
    if charsmap:
        check_charsmap(charsmap, where)
    return PieceModel(
        pieces=pieces,
        algorithm=algorithm,
        byte_fallback=bool(trainer.get(35, False)),
        unk_id=unk_id,
        charsmap=charsmap,
        add_dummy_prefix=bool(normalizer.get(3, True)),
        remove_extra_whitespaces=bool(normalizer.get(4, True)),
        escape_whitespaces=bool(normalizer.get(5, True)),
    )


def sentencepiece_backend(model: PieceModel, where: object, *, prefix: str, whole_pieces: bool) -> Backend:
    """Build the tokenizer of a model.

    Args:
        model: The pieces and how text is normalised.
        where: The file, for errors.
        prefix: Which texts get the space before them: `always` (every text between special tokens) or `first`.
        whole_pieces: Whether user-defined pieces are cut out before the text gets its prefix, as Llama's and Gemma's
            tokenizers do, and a text that starts with a space gets no second one; without it they are cut out after,
            as SentencePiece does.

    Returns:
        A `tokenizers.Tokenizer`; control pieces are special tokens.

    Raises:
        ValueError: If the pieces do not fit together.
    """
    _check_pieces(model, where)
    user_defined = [text for text, _, kind in model.pieces if kind == USER_DEFINED]
    with refusing_panics(where):
        backend = Backend(_algorithm(model, whole_pieces=whole_pieces))
        steps = _normalizers(model, second_prefix=prefix == "always" and not whole_pieces)
        if steps:
            backend.normalizer = normalizers.Sequence(steps)
        cuts: list[Any] = []
        if model.add_dummy_prefix:
            cuts.append(pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix, split=False))
        if user_defined and not whole_pieces:
            longest_first = sorted(user_defined, key=len, reverse=True)
            cuts.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), behavior="isolated"))
        if cuts:
            backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        backend.decoder = decoders.Sequence(_decoders(model))
        added = [
            (text, kind) for text, _, kind in model.pieces if kind == CONTROL or (kind == USER_DEFINED and whole_pieces)
        ]
        backend.add_tokens([AddedToken(text, special=kind == CONTROL, normalized=False) for text, kind in added])
    return backend


def _algorithm(model: PieceModel, *, whole_pieces: bool) -> Any:
    if model.algorithm == UNIGRAM:
        vocab = [(text, score) for text, score, _ in model.pieces]
        return models.Unigram(vocab, unk_id=model.unk_id, byte_fallback=model.byte_fallback)
    return models.BPE(
        vocab={text: number for number, (text, _, _) in enumerate(model.pieces)},
        merges=_merges(model.pieces, of_all=whole_pieces),
        unk_token=model.pieces[model.unk_id][0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=not whole_pieces and any(kind == USER_DEFINED for _, _, kind in model.pieces),
    )


def _merges(pieces: Sequence[tuple[str, float, int]], *, of_all: bool) -> list[tuple[str, str]]:
    """Pairs of pieces that make a third, best first: what SentencePiece finds anew for every text, by score.

    Llama's and Gemma's tokenizers merge `of_all` pieces, by id, so that Gemma's runs of spaces are found.
    """
    kinds = range(NORMAL, BYTE + 1) if of_all else (NORMAL,)
    mergeable = {text for text, _, kind in pieces if kind in kinds}
    ranked = []
    for number, (text, score, kind) in enumerate(pieces):
        if kind in kinds:
            for cut in range(1, len(text)):
                if text[:cut] in mergeable and text[cut:] in mergeable:
                    ranked.append((0.0 if of_all else -score, number, cut, text[:cut], text[cut:]))
    return [(left, right) for _, _, _, left, right in sorted(ranked)]


def _normalizers(model: PieceModel, *, second_prefix: bool) -> list[Any]:
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.escape_whitespaces:
        steps.append(normalizers.Replace(" ", "▁"))
    if model.add_dummy_prefix and second_prefix:
        # Metaspace gives no prefix to a text that starts with one; SentencePiece does.
        steps.append(normalizers.Replace(Regex(r"\A▁"), "▁▁"))
    return steps


def _decoders(model: PieceModel) -> list[Any]:
    steps: list[Any] = [decoders.Replace("▁", " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    if model.add_dummy_prefix or model.byte_fallback:
        steps.append(decoders.Fuse())
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return steps


def _check_pieces(model: PieceModel, where: object) -> None:
    texts = {text for text, _, _ in model.pieces}
    if len(texts) != len(model.pieces):
        raise ValueError(f"{where} repeats {len(model.pieces) - len(texts)} of its pieces; the file is damaged.")
    for text, score, kind in model.pieces:
        if not text or len(text) > MAX_PIECE_CHARACTERS or not math.isfinite(score) or not NORMAL <= kind <= BYTE:
            raise ValueError(
                f"{where} holds the piece {text[:40]!r} of {len(text)} characters, score {score} and kind {kind}. A "
                f"piece has 1 to {MAX_PIECE_CHARACTERS} characters, a finite score and a kind from {NORMAL} to {BYTE}."
            )
    if model.byte_fallback:
        missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in texts]
        if missing:
            raise ValueError(f"{where} falls back to bytes but has no piece <0x{missing[0]:02X}>; the file is damaged.")


def _piece(data: bytes, where: object) -> tuple[str, float, int]:
    message = dict(_fields(data, where))
    raw = _expect(message.get(1, b""), bytes, "the text of a piece", where)
    # The shortest decimal of the float32: tokenizer.json writes it and reads the same number again.
    score = float(str(np.float32(_expect(message.get(2, 0.0), float, "a score", where))))
    try:
        return (
            raw.decode("utf-8"),
            score,
            _expect(message.get(3, 1), int, "a kind", where),
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} holds the piece {raw[:40]!r}, which is not UTF-8.") from error


def _expect(value: Any, kind: type, what: str, where: object) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} stores {what} as {type(value).__name__}, not {kind.__name__}; the file is damaged.")
    return value


def _fields(data: bytes, where: object) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a protobuf message: int, float or bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position, where)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position, where)
            yield number, value
            continue
        if kind == _BYTES:
            length, position = _varint(data, position, where)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"{where} is not a SentencePiece model: wire type {kind} at byte {position}.")
        end = position + length
        if number == 0 or end > len(data):
            raise ValueError(
                f"{where} is not a SentencePiece model, or is truncated: field {number} asks for {length} bytes at "
                f"{position} of {len(data)}."
            )
        raw = data[position:end]
        position = end
        yield number, struct.unpack("<f", raw)[0] if kind == _FIXED32 else raw


def _varint(data: bytes, position: int, where: object) -> tuple[int, int]:
    result = 0
    for place in range(10):
        if position + place >= len(data):
            raise ValueError(f"{where} is truncated: a number is cut off at byte {position}.")
        byte = data[position + place]
        result |= (byte & 127) << (7 * place)
        if byte < 128:
            # Negative numbers of 32 bits are written as 64.
            return (result - 2**64 if result >= 2**63 else result), position + place + 1
    raise ValueError(f"{where} is not a SentencePiece model: a number at byte {position} has no end.")

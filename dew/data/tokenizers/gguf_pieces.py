"""SentencePiece tokenizers in the metadata of a GGUF file: `tokenizer.ggml.model` is `llama`.

Entry point: `pieces_from_metadata`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from dew.data.byte_pairs import add_ends, field
from dew.data.tokenizers.sentencepiece import BPE, BYTE, UNKNOWN, PieceModel, sentencepiece_backend


def pieces_from_metadata(metadata: Mapping[str, Any]) -> Backend:
    """Build the tokenizer that a GGUF file describes by pieces and scores.

    Args:
        metadata: The file's keys and values; only `tokenizer.ggml.*` is read.

    Returns:
        A `tokenizers.Tokenizer`; every text between special tokens gets a space before it unless the file says no.

    Raises:
        ValueError: If a key is missing, or the lists do not fit together.
    """
    tokens, scores, kinds = (field(metadata, name) for name in ("tokens", "scores", "token_type"))
    if not len(tokens) == len(scores) == len(kinds):
        raise ValueError(
            f"tokenizer.ggml.tokens, scores and token_type must be of one length. Received: {len(tokens)}, "
            f"{len(scores)} and {len(kinds)}."
        )
    pieces = [(str(text), float(score), int(kind)) for text, score, kind in zip(tokens, scores, kinds, strict=True)]
    unknown = next((number for number, piece in enumerate(pieces) if piece[2] == UNKNOWN), 0)
    unk_id = metadata.get("tokenizer.ggml.unknown_token_id", unknown)
    if type(unk_id) is not int or not 0 <= unk_id < len(pieces):
        raise ValueError(f"tokenizer.ggml.unknown_token_id is {unk_id!r}, outside the vocabulary of {len(pieces)}.")
    model = PieceModel(
        pieces=pieces,
        algorithm=BPE,
        byte_fallback=any(kind == BYTE for _, _, kind in pieces),
        unk_id=unk_id,
        add_dummy_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
    )
    backend = sentencepiece_backend(model, "tokenizer.ggml.tokens", prefix="always", whole_pieces=False)
    backend.add_special_tokens([text for text, _, kind in pieces if kind == UNKNOWN])
    add_ends(backend, metadata, {text: number for number, (text, _, _) in enumerate(pieces)}, adds_bos=True)
    return backend

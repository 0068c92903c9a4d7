"""Rows of tokens from what people have: texts, prompts with responses, chats, or token rows.

Entry point: `language_rows`. It returns the rows and a report of what was cut and what is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dew.data.chat import is_chat
from dew.data.packing import Document, fill_rows, plan_rows
from dew.data.text import Tokenizer

MOST_STEPS = 1024
"""Multiples of 16 that are tried for the length of rows without a longest context."""
_FIELDS = ("tokens", "loss_mask", "segment_ids", "positions")
_FORMS = (
    "texts (strings), {'prompts': [...], 'responses': [...]}, chats (lists of role/content messages), an integer "
    "array [rows, T + 1], or a dict of such arrays with 'tokens'"
)


@dataclass(frozen=True, kw_only=True)
class RowReport:
    """What became of the documents.

    Attributes:
        documents: How many were given.
        rows: How many rows hold them.
        length: Positions T that the model reads in a row; a row has T + 1 tokens.
        packing: Whether documents share rows.
        tokens: Tokens kept.
        truncated_tokens: Tokens cut off.
        truncated_documents: Documents that lost tokens.
        scored_tokens: Tokens that the loss counts.
    """

    documents: int
    rows: int
    length: int
    packing: bool
    tokens: int
    truncated_tokens: int
    truncated_documents: int
    scored_tokens: int

    @property
    def padding_fraction(self) -> float:
        """Part of all places in the rows that holds no token."""
        return 1 - self.tokens / (self.rows * (self.length + 1))

    def __str__(self) -> str:
        cut = (
            f"{self.truncated_tokens} tokens cut off {self.truncated_documents} documents"
            if self.truncated_tokens
            else "no tokens cut off"
        )
        return (
            f"{self.documents} documents in {self.rows} rows, sequence length {self.length}, packing "
            f"{'on' if self.packing else 'off'}, {cut}, {self.scored_tokens} scored tokens"
        )


def language_rows(
    inputs: Any,
    tokenizer: Tokenizer | None = None,
    length: int | None = None,
    packing: bool = False,
    *,
    max_length: int | None = None,
    fits: Callable[[int], bool] | None = None,
) -> tuple[dict[str, np.ndarray], RowReport]:
    """Turn language-model inputs into rows of one length.

    Args:
        inputs: Texts; `{"prompts": [...], "responses": [...]}`; chats; an integer array
            [rows, T + 1]; or a dict with such an array under `tokens` and, optionally,
            `loss_mask`, `segment_ids` and `positions` of its shape. Texts receive the
            checkpoint's start and end tokens and are scored whole; of a prompt and its response
            the response with its end token is scored; of a chat the assistant's turns.
        tokenizer: Needed for everything but token rows.
        length: Positions T that the model reads. None takes the longest document, rounded up
            to a multiple of 16, and at most `max_length`. Token rows keep their own.
        packing: Put several documents into a row, first fit. Texts longer than a row are then
            continued in further rows instead of being cut.
        max_length: The model's context, in positions.
        fits: Says whether rows of a length can be computed, such as cut over a mesh; it decides which multiple of 16
            `length=None` takes, or which length where no multiple within the context will do. None takes any.

    Returns:
        `tokens`, `segment_ids`, `positions` int32 [rows, T + 1] and `loss_mask` bool
        [rows, T + 1] (token i is scored where true; padding is segment 0), and the report.
        Token rows return the fields that were given.

    Raises:
        ValueError: If there is nothing to train on, a length is wrong, or shapes differ.
        TypeError: If the inputs have none of these forms.
    """
    if _is_token_rows(inputs):
        return _given_rows(inputs, length, packing, max_length)
    if tokenizer is None:
        raise ValueError("Texts and chats need a tokenizer. Give one, or give token rows [rows, T + 1].")
    documents, splittable = _documents(inputs, tokenizer)
    longest = max(len(document.tokens) for document in documents)
    width = (_row_length(length, max_length) if length is not None else _own_length(longest, max_length, fits)) + 1
    pieces = [piece for document in documents for piece in _fit(document, width, split=packing and splittable)]
    rows = fill_rows(
        pieces, plan_rows([len(piece.tokens) for piece in pieces], width, packing=packing), width, tokenizer.pad_id
    )
    scored = int(rows["loss_mask"].sum())
    if scored == 0:
        raise ValueError(
            f"None of the {len(documents)} documents has a token to score within {width - 1} positions. "
            "Give a larger length, documents of two tokens and more, or chats with a message of role 'assistant'."
        )
    cut = [0 if packing and splittable else max(len(document.tokens) - width, 0) for document in documents]
    report = RowReport(
        documents=len(documents),
        rows=len(rows["tokens"]),
        length=width - 1,
        packing=packing,
        tokens=sum(len(piece.tokens) for piece in pieces),
        truncated_tokens=sum(cut),
        truncated_documents=sum(count > 0 for count in cut),
        scored_tokens=scored,
    )
    return rows, report


def _own_length(longest: int, max_length: int | None, fits: Callable[[int], bool] | None) -> int:
    """Choose the positions of rows whose longest document has `longest` tokens."""
    rounded = max(-(-(longest - 1) // 16) * 16, 16)
    largest = rounded + 16 * MOST_STEPS if max_length is None else max_length
    if fits is None:
        return min(rounded, largest)
    longer = (size for step in (16, 1) for size in range(rounded, largest + 1, step) if fits(size))
    shorter = (size for size in range(min(rounded, largest), 0, -1) if fits(size))
    # What fits nowhere is refused where it is computed, with its reason.
    return next(longer, None) or next(shorter, None) or min(rounded, largest)


def _row_length(length: int, max_length: int | None) -> int:
    if length < 1:
        raise ValueError(f"The sequence length must be at least 1. Received: {length}")
    if max_length is not None and length > max_length:
        raise ValueError(
            f"The sequence length {length} exceeds the model's context of {max_length} positions. "
            f"Use at most {max_length}."
        )
    return length


def _fit(document: Document, width: int, *, split: bool) -> list[Document]:
    """Cut a document at a row's width, or continue it with one token repeated at each seam."""
    if not split:
        return [Document(tokens=document.tokens[:width], scored=document.scored[:width])]
    # The last token of a piece starts the next one, so every token but the first is predicted once.
    starts = range(0, max(len(document.tokens) - 1, 1), width - 1)
    return [Document(tokens=document.tokens[at : at + width], scored=document.scored[at : at + width]) for at in starts]


def _documents(inputs: Any, tokenizer: Tokenizer) -> tuple[list[Document], bool]:
    """Tokenize texts, prompts with responses, or chats; say whether they may be split."""
    if isinstance(inputs, Mapping):
        return _answered_prompts(inputs, tokenizer), False
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "UTO":
        inputs = inputs.ravel().tolist()
    if isinstance(inputs, str) or is_chat(inputs):
        inputs = [inputs]
    if not isinstance(inputs, Sequence):
        raise TypeError(f"Language-model inputs are {_FORMS}. Received: {type(inputs).__name__}")
    if not inputs:
        raise ValueError(f"There is no data: language-model inputs are {_FORMS}. Received: {inputs!r}")
    if all(isinstance(item, str) for item in inputs):
        return _texts(inputs, tokenizer), True
    if all(is_chat(item) for item in inputs):
        pairs = [tokenizer.chat_mask(messages) for messages in inputs]
        return [_document(ids, mask) for ids, mask in pairs], False
    kinds = sorted({type(item).__name__ for item in inputs})
    raise TypeError(f"Language-model inputs are {_FORMS}, not mixed. Received: a list of {', '.join(kinds)}")


def _document(ids: Sequence[int], scored: Sequence[bool] | np.ndarray) -> Document:
    return Document(tokens=np.asarray(ids, np.int32), scored=np.asarray(scored, bool))


def _with_end(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return ids if tokenizer.eos_id is None or ids[-1:] == [tokenizer.eos_id] else [*ids, tokenizer.eos_id]


def _texts(texts: Sequence[str], tokenizer: Tokenizer) -> list[Document]:
    rows = [_with_end(ids, tokenizer) for ids in tokenizer.encode_batch(texts)]
    return [_document(ids, np.ones(len(ids), bool)) for ids in rows]


def _answered_prompts(inputs: Mapping[str, Any], tokenizer: Tokenizer) -> list[Document]:
    if set(inputs) != {"prompts", "responses"}:
        raise ValueError(
            "A dict of language-model inputs holds 'prompts' and 'responses', or 'tokens' with optional "
            f"'loss_mask', 'segment_ids', 'positions'. Received: {sorted(map(str, inputs))}"
        )
    for name in ("prompts", "responses"):
        if isinstance(inputs[name], str):
            raise TypeError(f"{name!r} is a list of texts, one per row. Received: {name}={inputs[name]!r}")
    prompts, responses = list(inputs["prompts"]), list(inputs["responses"])
    if len(prompts) != len(responses):
        raise ValueError(
            f"Every prompt needs one response. Received: {len(prompts)} prompts, {len(responses)} responses"
        )
    if not prompts:
        raise ValueError("There is no data: 'prompts' and 'responses' are empty.")
    # Apart, so that the prompt's ids are those that generation starts from.
    heads = [_without_end(ids, tokenizer) for ids in tokenizer.encode_batch(prompts)]
    tails = [_with_end(ids, tokenizer) for ids in tokenizer.encode_batch(responses, add_special_tokens=False)]
    return [
        _document([*head, *tail], [False] * len(head) + [True] * len(tail))
        for head, tail in zip(heads, tails, strict=True)
    ]


def _without_end(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return ids[:-1] if tokenizer.eos_id is not None and ids[-1:] == [tokenizer.eos_id] else ids


def _is_token_rows(inputs: Any) -> bool:
    if isinstance(inputs, Mapping):
        return "tokens" in inputs
    return hasattr(inputs, "dtype") and np.issubdtype(np.dtype(inputs.dtype), np.number)


def _given_rows(
    inputs: Any, length: int | None, packing: bool, max_length: int | None
) -> tuple[dict[str, np.ndarray], RowReport]:
    rows = dict(inputs) if isinstance(inputs, Mapping) else {"tokens": inputs}
    unknown = sorted(set(map(str, rows)) - set(_FIELDS))
    if unknown:
        raise ValueError(f"Token rows hold the fields {', '.join(_FIELDS)}. Received also: {', '.join(unknown)}")
    rows = {name: np.asarray(value) for name, value in rows.items()}
    tokens = rows["tokens"]
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"Token rows are integers of shape [rows, T + 1]. Received: shape={tokens.shape}, dtype={tokens.dtype}"
        )
    if tokens.shape[0] == 0 or tokens.shape[1] < 2:
        raise ValueError(f"Token rows need one row and two tokens at least. Received: shape={tokens.shape}")
    for name, value in rows.items():
        if value.shape != tokens.shape:
            raise ValueError(f"{name!r} must have the shape of 'tokens', {tokens.shape}. Received: shape={value.shape}")
    if packing:
        raise ValueError("Token rows are packed already or not at all; give texts or documents to pack.")
    if length is not None and length != tokens.shape[1] - 1:
        raise ValueError(
            f"Token rows of {tokens.shape[1]} tokens have the sequence length {tokens.shape[1] - 1}. "
            f"Received: length={length}"
        )
    _row_length(tokens.shape[1] - 1, max_length)
    return _typed(rows), _given_report(rows)


def _typed(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    for name, value in rows.items():
        if name == "loss_mask" and not np.isin(value, (0, 1)).all():
            raise ValueError(
                "loss_mask says for each token whether it is scored: true or false, 1 or 0. "
                f"Received: values from {value.min()} to {value.max()}"
            )
        if name != "loss_mask" and value.size and not -(2**31) <= value.min() <= value.max() < 2**31:
            raise ValueError(f"{name!r} must fit 32 bits. Received: values from {value.min()} to {value.max()}")
    return {name: value.astype(bool if name == "loss_mask" else np.int32) for name, value in rows.items()}


def _given_report(rows: Mapping[str, np.ndarray]) -> RowReport:
    tokens = rows["tokens"]
    segments = rows.get("segment_ids", np.ones(tokens.shape, np.int32))
    scored = rows.get("loss_mask", np.ones(tokens.shape, bool)).astype(bool)[:, 1:]
    scored = scored & (segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])
    return RowReport(
        documents=len(tokens),
        rows=len(tokens),
        length=tokens.shape[1] - 1,
        packing=bool((segments > 1).any()),
        tokens=int((segments > 0).sum()),
        truncated_tokens=0,
        truncated_documents=0,
        scored_tokens=int(scored.sum()),
    )

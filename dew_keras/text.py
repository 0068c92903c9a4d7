"""Language-model inputs: texts, prompts with responses and chats become rows of tokens.

Entry points: `is_language_input`, `make_rows`, `language_stream`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from dew.data.chat import is_chat
from dew.data.text import Tokenizer
from dew.data.tokens import RowReport, language_rows
from dew_keras.inputs import RowSharing, Source
from dew_keras.streams import DatasetSource, IterableSource


def is_language_input(x: Any) -> bool:
    """Say whether data is one of the forms only language models take, or token rows.

    Args:
        x: What `fit` was given as x.
    """
    if isinstance(x, str) or is_chat(x):
        return True
    if isinstance(x, Mapping):
        return "tokens" in x or "prompts" in x
    if isinstance(x, Sequence):
        return bool(x) and (isinstance(x[0], str) or is_chat(x[0]))
    dtype = getattr(x, "dtype", None)
    return dtype is not None and np.dtype(dtype).kind in "iuUO" and getattr(x, "ndim", 0) <= 2


def is_token_rows(x: Any) -> bool:
    """Say whether data is token rows, made already.

    Args:
        x: Language-model inputs.
    """
    if isinstance(x, Mapping):
        return "tokens" in x
    return hasattr(x, "dtype") and np.dtype(x.dtype).kind in "iu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageRows:
    """Token rows and what became of the texts they were made of."""

    arrays: dict[str, np.ndarray]
    report: RowReport


def make_rows(
    inputs: Any,
    tokenizer: Tokenizer | None,
    *,
    length: int | None,
    packing: bool,
    max_length: int | None,
    fits: Callable[[int], bool],
) -> LanguageRows:
    """Turn language-model inputs into token rows.

    Args:
        inputs: Texts, prompts with responses, chats or token rows.
        tokenizer: Needed for everything but token rows.
        length: Positions of a row; None takes the longest document, in a length that the mesh takes.
        packing: Whether documents share rows.
        max_length: The model's context.
        fits: Says whether the mesh takes rows of a length.
    """
    if isinstance(inputs, str):
        raise ValueError(
            f"Give a list of texts; one string is one document, and a path is not read. Received: {inputs[:60]!r}"
        )
    if is_token_rows(inputs):
        length, packing = None, False  # the rows are made already
    rows, report = language_rows(inputs, tokenizer, length, packing, max_length=max_length, fits=fits)
    return LanguageRows(arrays=dict(rows), report=report)


def language_stream(
    batches: Any, convert: Callable[[Any], dict[str, Any]], *, sharing: RowSharing, seed: int | None = None
) -> Source:
    """Make a source of an iterable of language batches.

    Args:
        batches: Gives texts, prompts with responses, chats or token rows, a batch at a time.
        convert: Turns one of them into token rows.
        sharing: How rows meet the mesh.
        seed: Shuffles the batches of a PyDataset by (seed, epoch); None keeps their order.
    """
    if isinstance(batches, keras.utils.PyDataset):
        return DatasetSource(batches, convert, sharing=sharing, seed=seed)
    is_spent_once = iter(batches) is batches
    spent = (
        "The iterator is spent: it cannot start again for another pass. Give steps_per_epoch with an endless one."
        if is_spent_once
        else "A pass over the data gave no batch."
    )
    steps = len(batches) if hasattr(batches, "__len__") else None
    return IterableSource(lambda epoch: iter(batches), convert, sharing=sharing, steps=steps, when_spent=spent)


def as_keras_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Write token rows as inputs, targets and weights, for a Keras loss on logits.

    Args:
        batch: Token rows by field.
    """
    tokens = np.asarray(batch["tokens"])
    x: dict[str, Any] = {"tokens": tokens[:, :-1]}
    weights = np.asarray(batch.get("loss_mask", np.ones(tokens.shape, bool)))[:, 1:].astype(np.float32)
    for name in ("segment_ids", "positions"):
        if name in batch:
            x[name] = np.asarray(batch[name])[:, :-1]
    if "segment_ids" in batch:
        segments = np.asarray(batch["segment_ids"])
        weights = weights * ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0))
    return {"x": x, "y": tokens[:, 1:], "sample_weight": weights}

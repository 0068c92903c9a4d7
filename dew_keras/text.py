"""Language-model inputs and outputs: texts and chats to rows of tokens, prompts to ids, ids back to text.

Entry points: `is_language_input`, `make_rows`, `language_stream`, `Prompts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dew.data.chat import is_chat
from dew.data.text import Tokenizer
from dew.data.tokens import RowReport, language_rows
from dew_keras.inputs import IterableSource, RowSharing, Source

DEFAULT_TOTAL_LENGTH = 1024


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
    inputs: Any, tokenizer: Tokenizer | None, *, length: int | None, packing: bool, max_length: int | None
) -> LanguageRows:
    """Turn language-model inputs into token rows.

    Args:
        inputs: Texts, prompts with responses, chats or token rows.
        tokenizer: Needed for everything but token rows.
        length: Positions of a row; None takes the longest document.
        packing: Whether documents share rows.
        max_length: The model's context.
    """
    if is_token_rows(inputs):
        length, packing = None, False  # the rows are made already
    rows, report = language_rows(inputs, tokenizer, length, packing, max_length=max_length)
    return LanguageRows(arrays=dict(rows), report=report)


def language_stream(batches: Any, convert: Callable[[Any], dict[str, Any]], *, sharing: RowSharing) -> Source:
    """Make a source of an iterable of language batches.

    Args:
        batches: Gives texts, prompts with responses, chats or token rows, a batch at a time.
        convert: Turns one of them into token rows.
        sharing: How rows meet the mesh.
    """
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


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts as token ids, and the way back to the kind that was given.

    Attributes:
        ids: Token ids per prompt.
        kind: "text", "chat" or "ids".
        is_single: Whether one prompt was given, not a list of them.
        texts: The texts given, where the kind is "text".
    """

    ids: tuple[tuple[int, ...], ...]
    kind: str
    is_single: bool
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: Any, tokenizer: Tokenizer | None) -> Prompts:
        """Encode what `generate` was given.

        Args:
            inputs: A string, a chat, a list of ids, or a list of one of these.
            tokenizer: Needed for strings and chats.

        Raises:
            ValueError: If there is nothing to continue, or the tokenizer is missing.
            TypeError: If the input is none of these.
        """
        inputs = inputs.tolist() if isinstance(inputs, np.ndarray) or hasattr(inputs, "__jax_array__") else inputs
        if hasattr(inputs, "shape"):
            inputs = np.asarray(inputs).tolist()
        is_single = isinstance(inputs, str) or is_chat(inputs) or _is_ids(inputs)
        items = [inputs] if is_single else inputs
        if not isinstance(items, list | tuple):
            raise TypeError(
                "generate takes a string, a chat, a list of token ids, or a list of one of these. "
                f"Received: {type(inputs).__name__}"
            )
        if not items:
            raise ValueError("generate needs at least one prompt. Received: an empty list.")
        if all(_is_ids(item) for item in items):
            return cls(tuple(tuple(int(i) for i in item) for item in items), "ids", is_single)
        kind = "text" if all(isinstance(item, str) for item in items) else "chat"
        if kind == "chat" and not all(is_chat(item) for item in items):
            names = sorted({type(item).__name__ for item in items})
            raise TypeError(f"generate takes prompts of one kind in a list. Received: {', '.join(names)}")
        if tokenizer is None:
            raise ValueError("This model has no tokenizer, so it continues token ids. Give lists of ids.")
        if kind == "chat":
            return cls(tuple(tuple(tokenizer.chat(item)) for item in items), kind, is_single)
        ids = tuple(tuple(_open_ended(tokenizer.encode(text), tokenizer)) for text in items)
        return cls(ids, kind, is_single, tuple(items))

    def restore(self, new: Sequence[Sequence[int]], tokenizer: Tokenizer | None, *, strip_prompt: bool) -> Any:
        """Turn new tokens into the kind that was given.

        Args:
            new: New ids per prompt.
            tokenizer: The tokenizer that encoded the prompts.
            strip_prompt: Leave the prompt out; a chat gives the reply alone in any case.
        """
        results: list[Any] = []
        for number, (prompt, tokens) in enumerate(zip(self.ids, new, strict=True)):
            if self.kind == "ids":
                results.append(list(tokens) if strip_prompt else [*prompt, *tokens])
                continue
            assert tokenizer is not None, "texts were encoded, so there is a tokenizer"
            text = continuation(prompt, tokens, tokenizer)
            results.append(text if self.kind == "chat" or strip_prompt else self.texts[number] + text)
        return results[0] if self.is_single else results


def continuation(prompt: Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Decode what follows a prompt, with the space that a decoder strips from the start of a text.

    Args:
        prompt: Ids of the prompt.
        tokens: Ids that follow it.
        tokenizer: Decodes them.
    """
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(tokens)


def token_budgets(
    prompts: Sequence[Sequence[int]],
    *,
    max_length: int | None,
    max_new_tokens: int | None,
    context: int,
    generation_config: Mapping[str, Any],
) -> list[int]:
    """Say how many tokens each prompt may get.

    Args:
        prompts: Ids per prompt.
        max_length: Tokens of prompt and answer together, or None.
        max_new_tokens: Tokens of the answer, or None.
        context: The model's context.
        generation_config: The checkpoint's defaults.

    Returns:
        A number per prompt.

    Raises:
        ValueError: If both limits are given, or one leaves nothing to generate.
    """
    if max_length is not None and max_new_tokens is not None:
        raise ValueError(
            "Give max_length (prompt and answer) or max_new_tokens (the answer), not both. "
            f"Received: max_length={max_length}, max_new_tokens={max_new_tokens}"
        )
    if max_length is None and max_new_tokens is None:
        max_new_tokens = generation_config.get("max_new_tokens")
    if max_new_tokens is not None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1. Received: max_new_tokens={max_new_tokens}")
        return [int(max_new_tokens)] * len(prompts)
    limit = min(max_length or DEFAULT_TOTAL_LENGTH, context) if max_length is None else max_length
    budgets = [limit - len(prompt) for prompt in prompts]
    if min(budgets) < 1:
        longest = max(len(prompt) for prompt in prompts)
        raise ValueError(
            f"max_length={limit} counts prompt and answer, and a prompt has {longest} tokens already. "
            "Raise max_length, or give max_new_tokens."
        )
    return budgets


def _is_ids(item: Any) -> bool:
    return (
        isinstance(item, list | tuple)
        and bool(item)
        and all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in item)
    )


def _open_ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    # Some tokenizers close every text; a prompt must stay open.
    return ids[:-1] if tokenizer.eos_id is not None and ids[-1:] == [tokenizer.eos_id] and len(ids) > 1 else ids

"""What a person asks a model to continue, and the same kind of thing handed back.

Entry points: `Prompts` encodes texts, chats or token ids and restores the kind from new ids; `token_budgets` and
`stop_ids` settle where each answer ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dew.data.chat import is_chat
from dew.data.text import Tokenizer

DEFAULT_TOTAL_LENGTH = 1024
"""Tokens of prompt and answer together where nothing sets a limit, in a context that holds more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts as token ids, and the way back to the kind that was given.

    Attributes:
        ids: Token ids per prompt.
        kind: What was given.
        is_single: Whether one prompt was given rather than a list of them.
        texts: The texts given, where the kind is "text".
    """

    ids: tuple[tuple[int, ...], ...]
    kind: Literal["text", "chat", "ids"]
    is_single: bool
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: Any, tokenizer: Tokenizer | None) -> Prompts:
        """Encode prompts.

        Args:
            inputs: A string, a chat, a list of token ids, or a list of one of these; an array counts as lists.
            tokenizer: Needed for strings and chats.

        Returns:
            The prompts.

        Raises:
            TypeError: If the input is none of these, or mixes them.
            ValueError: If there is nothing to continue, or the tokenizer is missing.
        """
        if hasattr(inputs, "__array__"):
            inputs = np.asarray(inputs).tolist()
        is_single = isinstance(inputs, str) or is_chat(inputs) or _is_ids(inputs)
        items = [inputs] if is_single else inputs
        if not isinstance(items, list | tuple):
            raise TypeError(
                "Give a string, a chat, a list of token ids, or a list of one of these. "
                f"Received: {type(inputs).__name__}"
            )
        if not items:
            raise ValueError("There is nothing to continue: give at least one prompt. Received: an empty list")
        items = [item.tolist() if isinstance(item, np.ndarray) else item for item in items]
        if all(_is_ids(item) for item in items):
            return cls(ids=tuple(tuple(map(int, item)) for item in items), kind="ids", is_single=is_single)
        is_text = all(isinstance(item, str) for item in items)
        if not is_text and not all(is_chat(item) for item in items):
            names = ", ".join(sorted({type(item).__name__ for item in items}))
            raise TypeError(
                f"Prompts of one list must all be strings, all chats or all lists of ids. Received: {names}"
            )
        if tokenizer is None:
            raise ValueError("The model came without a tokenizer, so it continues token ids only. Give lists of ids.")
        if not is_text:
            return cls(ids=tuple(tuple(tokenizer.chat(item)) for item in items), kind="chat", is_single=is_single)
        encoded = tuple(tuple(_open_ended(row, tokenizer)) for row in tokenizer.encode_batch(items))
        return cls(ids=encoded, kind="text", is_single=is_single, texts=tuple(items))

    def restore(self, new: Sequence[Sequence[int]], tokenizer: Tokenizer | None, *, strip_prompt: bool = False) -> Any:
        """Turn new tokens into the kind that was given.

        Args:
            new: New ids per prompt.
            tokenizer: The tokenizer that encoded the prompts.
            strip_prompt: Leave the prompt out; a chat gives the reply alone in any case.

        Returns:
            Strings or lists of ids; one of them where one prompt was given.
        """
        results: list[Any] = []
        for row, (prompt, tokens) in enumerate(zip(self.ids, new, strict=True)):
            if self.kind == "ids":
                results.append(list(tokens) if strip_prompt else [*prompt, *tokens])
                continue
            assert tokenizer is not None, "texts were encoded, so there is a tokenizer"
            text = continuation(prompt, tokens, tokenizer)
            results.append(text if self.kind == "chat" or strip_prompt else self.texts[row] + text)
        return results[0] if self.is_single else results


def continuation(prompt: Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Decode what follows a prompt.

    Decoding the new ids alone would lose the space that some decoders strip from the start of a text.

    Args:
        prompt: Ids of the prompt.
        tokens: Ids that follow it; those of padding rows of the table, which no token has, are left out.
        tokenizer: Decodes them.
    """
    tokens = [token for token in tokens if token < tokenizer.vocab_size]
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
        context: The model's context in tokens.
        generation_config: The checkpoint's defaults; its `max_new_tokens`, else its `max_length`, counts where neither
            limit is given.

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
    if max_new_tokens is not None:
        if not _is_whole(max_new_tokens) or max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be 1 or more, a whole number. Received: max_new_tokens={max_new_tokens!r}"
            )
        return [int(max_new_tokens)] * len(prompts)
    longest = max(len(prompt) for prompt in prompts)
    if max_length is None:
        wanted = generation_config.get("max_new_tokens")
        # A default is no demand: it gives way to the context, where a number given by the caller is refused.
        room = context - longest
        if room < 1:
            return [1] * len(prompts)
        if wanted is not None:
            return [max(1, min(int(wanted), context - len(prompt))) for prompt in prompts]
        total = generation_config.get("max_length")
        if total is not None:
            return [max(1, min(int(total), context) - len(prompt)) for prompt in prompts]
        max_length = context if longest >= DEFAULT_TOTAL_LENGTH else min(context, DEFAULT_TOTAL_LENGTH)
    elif max_length > context:
        raise ValueError(f"max_length={max_length} exceeds the model's context of {context}. Use {context} or less.")
    if longest >= max_length:
        raise ValueError(
            f"max_length={max_length} counts prompt and answer, and a prompt has {longest} tokens already. "
            "Raise max_length, or give max_new_tokens."
        )
    return [max_length - len(prompt) for prompt in prompts]


def stop_ids(
    given: Iterable[int] | Literal["auto"] | None, tokenizer: Tokenizer | None, generation_config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Settle the tokens that end an answer.

    Args:
        given: The ids; "auto" for those of the tokenizer and the checkpoint; None or an empty list never stops.
        tokenizer: The model's tokenizer, or None.
        generation_config: The checkpoint's defaults; its `eos_token_id` counts.

    Returns:
        The ids, without repeats.

    Raises:
        ValueError: If `given` is another word or no ids, or "auto" finds no id.
    """
    if given is None:
        return ()
    if not isinstance(given, str):
        ids = list(given) if isinstance(given, Iterable) else [None]
        if all(map(_is_whole, ids)):
            return tuple(dict.fromkeys(map(int, ids)))
    if not isinstance(given, str) or given != "auto":
        raise ValueError(f"stop_token_ids must be 'auto', None or a list of ids. Received: stop_token_ids={given!r}")
    found = [] if tokenizer is None else list(tokenizer.stop_ids)
    ends = generation_config.get("eos_token_id")
    found += [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if not found:
        raise ValueError(
            "stop_token_ids='auto' needs a tokenizer or a checkpoint that names its end token. Pass the ids, or [] to "
            "stop at the length alone."
        )
    return tuple(dict.fromkeys(int(token) for token in found))


def _is_whole(item: Any) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _is_ids(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and all(map(_is_whole, item))


def _open_ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Take the end token off: some tokenizers close every text, and a prompt goes on."""
    closed = tokenizer.eos_id is not None and len(ids) > 1 and ids[-1] == tokenizer.eos_id
    return ids[:-1] if closed else ids

"""Chats as text: messages through a checkpoint's template, and where the answers lie in it.

Entry point: `ChatTemplate`. A span of an assistant's turn runs from the end of the generation
prompt to the end of the turn's own end token, so that it is what a model would have written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dew.data.template_budget import ChatTemplateError
from dew.data.template_sandbox import MARK_END, MARK_START, compile_template, render_bounded

Message = Mapping[str, Any]


def is_chat(value: Any) -> bool:
    """Tell whether a value has the form of a chat: a non-empty list of role/content mappings."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Copy a chat as plain JSON values.

    Args:
        messages: Mappings with a text under `role` and a text under `content`; further keys
            (a name, reasoning text) pass through to the template when they are JSON values.

    Returns:
        Fresh dicts that hold exact JSON types only.

    Raises:
        ValueError: If the chat is empty or a message lacks its role or its content.
        TypeError: If a message is not a mapping or holds something that is not JSON.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            f"A chat is a list of {{'role': ..., 'content': ...}} messages. Received: {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("A chat needs at least one message. Received: []")
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"Message {number} of a chat must be a dict. Received: {message!r}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"Message {number} of a chat needs text under {key!r}. Received: {key}={message.get(key)!r}"
                )
        plain.append({str(key): _plain(value) for key, value in message.items()})
    return plain


def _plain(value: Any) -> Any:
    # Exact JSON types only: methods of richer objects are beyond what the sandbox can judge.
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"A chat message may hold JSON values only. Received: {type(value).__name__} {value!r}")


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) + 4 for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_size(item) + 2 for item in value)
    return 8


def _without_marks(marked: str) -> tuple[str, dict[str, list[int]]]:
    """Take the marks out and say where each stood in the text that is left."""
    places: dict[str, list[int]] = {MARK_START: [], MARK_END: []}
    pieces, length = [], 0
    for piece in re.split(f"([{MARK_START}{MARK_END}])", marked):
        if piece in places:
            places[piece].append(length)
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), places


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    # Inside the outer whitespace, so that a template that strips contents still does.
    content = message["content"]
    core = content.strip()
    lead = content[: len(content) - len(content.lstrip())] if core else ""
    tail = content[len(content.rstrip()) :] if core else content
    return {**message, "content": f"{lead}{MARK_START}{core}{MARK_END}{tail}"}


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A checkpoint's chat template with the special tokens that it may print.

    Args:
        source: Jinja source.
        special_tokens: Text by name, such as `bos_token` and `eos_token`; templates read these.
        closing_tokens: Texts of the special tokens that may end a turn.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    closing_tokens: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        compile_template(self.source)

    @property
    def marks_generation(self) -> bool:
        """Whether the template itself brackets the answers with `{% generation %}`."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def render(self, messages: Any, *, add_generation_prompt: bool = False, tools: Any = None) -> str:
        """Write a chat as the text its model was trained on.

        Args:
            messages: Mappings with `role` and `content`.
            add_generation_prompt: End with the opening of an assistant's turn.
            tools: Descriptions of functions that the model may call, as JSON values.

        Returns:
            The text, special tokens included.

        Raises:
            ChatTemplateError: If the template refuses the chat or does too much work.
            TypeError, ValueError: If a message is malformed.
        """
        return self._render(check_messages(messages), add_generation_prompt, tools=_plain(tools))

    def _render(self, messages: list, prompt: bool, *, mark_generation: bool = False, tools: Any = None) -> str:
        variables = {
            **self.special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        return render_bounded(
            compile_template(self.source),
            variables,
            input_characters=_size(messages) + _size(tools),
            mark_generation=mark_generation,
        )

    def assistant_spans(self, messages: Any) -> tuple[str, list[tuple[int, int]]]:
        """Render a chat and find what the assistant wrote in it.

        Args:
            messages: Mappings with `role` and `content`.

        Returns:
            The text and one `[start, end)` span of characters for each assistant's turn. A
            template with `{% generation %}` blocks decides its spans itself.

        Raises:
            ChatTemplateError: If the template rewrites contents so that a span cannot be found.
            TypeError, ValueError: If a message is malformed.
        """
        plain = check_messages(messages)
        for message in plain:
            if MARK_START in message["content"] or MARK_END in message["content"]:
                raise ValueError("A message holds U+FDD0 or U+FDD1, which are not characters. Remove them.")
        text = self._render(plain, False)
        if self.marks_generation:
            marked = self._render(plain, False, mark_generation=True)
            stripped, places = _without_marks(marked)
            self._expect_same(stripped, text)
            return text, list(zip(places[MARK_START], places[MARK_END], strict=True))
        turns = [number for number, message in enumerate(plain) if message["role"] == "assistant"]
        starts, ends = self._content_places(plain, turns, text)
        spans = []
        for order, turn in enumerate(turns):
            start = self._turn_start(plain[:turn], text, ends[order])
            start = starts[order] if start is None else start
            if start is None:
                raise ChatTemplateError(
                    f"the chat template cuts the content of message {turn} and has no generation "
                    "prompt before it, so its tokens cannot be scored."
                )
            spans.append((start, self._turn_end(plain[: turn + 1], text, ends[order])))
        return text, spans

    def _content_places(self, messages: list, turns: list[int], text: str) -> tuple[list[int | None], list[int]]:
        """Find where each assistant's content starts and ends in the text."""
        if not turns:
            return [], []
        marked = [_marked(message) if number in turns else message for number, message in enumerate(messages)]
        stripped, places = _without_marks(self._render(marked, False))
        self._expect_same(stripped, text)
        ends = places[MARK_END]
        starts: list[int | None] = list(places[MARK_START])
        if len(ends) != len(turns) or len(starts) > len(turns):
            raise ChatTemplateError(
                f"the chat template prints {len(ends)} of {len(turns)} assistant contents, so "
                "their tokens cannot be scored. Use a template with {% generation %} blocks."
            )
        if len(starts) < len(turns):
            # A template that cuts reasoning out of an answer loses the mark before it; the
            # generation prompt alone then says where the answer starts.
            return [None] * len(turns), ends
        return starts, ends

    def _expect_same(self, stripped: str, text: str) -> None:
        if stripped != text:
            raise ChatTemplateError(
                "the chat template prints an answer differently when its place is marked, so its "
                "tokens cannot be scored. Use a template with {% generation %} blocks."
            )

    def _turn_start(self, before: list, text: str, end: int) -> int | None:
        """Where generation would have begun, or None if the template has no such prefix."""
        if not before:
            return None
        try:
            prefix = self._render(before, True)
        except ChatTemplateError:
            return None  # some templates refuse chats that stop at this role
        return len(prefix) if text.startswith(prefix) and len(prefix) <= end else None

    def _turn_end(self, through: list, text: str, end: int) -> int:
        """Extend a content's end over the end token that the template prints after it."""
        marked = self._render([*through[:-1], _marked(through[-1])], False)
        tail = marked[marked.rfind(MARK_END) + 1 :]
        spaces = len(tail) - len(tail.lstrip())
        for token in sorted(self.closing_tokens, key=len, reverse=True):
            closing = tail[:spaces] + token
            if tail.startswith(closing) and text.startswith(closing, end):
                return end + len(closing)
        content = through[-1]["content"]
        own = content[len(content.rstrip()) :]
        return end + len(own) if tail.startswith(own) else end

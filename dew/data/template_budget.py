"""The work that rendering one chat template may do, counted and not timed.

Entry points: `Budget`, the context variable `current_budget`, and the `charge_*` functions, which
do nothing while no rendering is under way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MappingView
from contextvars import ContextVar
from typing import Any

BASE_WORK = 20_000_000
WORK_PER_INPUT_CHARACTER = 256
STEP_WORK = 40  # one loop turn, call or filter
ITEM_WORK = 10  # one item of a list that is walked; a character costs 1

current_budget: ContextVar[Budget | None] = ContextVar("dew_template_budget", default=None)


class ChatTemplateError(ValueError):
    """A chat template could not be compiled, refused its input, or did too much work."""


class Budget:
    """Counts the work of one rendering and refuses the step that would exceed the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def charge(self, work: int) -> None:
        """Take work off the budget.

        Args:
            work: Units; a character handled costs 1.

        Raises:
            ChatTemplateError: If nothing is left.
        """
        self.left -= work
        if self.left < 0:
            raise ChatTemplateError(
                f"the chat template does more than {self.limit} units of work for this chat "
                f"({BASE_WORK} + {WORK_PER_INPUT_CHARACTER} for each character of input). "
                "Use a template whose work grows with the chat only."
            )

    def charge_value(self, value: Any) -> None:
        """Charge the printed size of a value; a list that holds another twice pays for both.

        Args:
            value: Any value that a template handles.

        Raises:
            ChatTemplateError: If nothing is left.
        """
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                self.charge(1 + len(item))
            elif isinstance(item, Mapping):
                self.charge(1 + ITEM_WORK * len(item))
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                self.charge(1 + ITEM_WORK * len(item))
                pending.extend(item)
            elif isinstance(item, range | MappingView):
                self.charge(1 + ITEM_WORK * len(item))
            elif isinstance(item, int):
                self.charge(1 + item.bit_length() // 3)
            else:
                self.charge(1)


def charge(work: int) -> None:
    """Charge the rendering under way; see `Budget.charge`."""
    budget = current_budget.get()
    if budget is not None:
        budget.charge(work)


def charge_value(value: Any) -> None:
    """Charge the printed size of a value; see `Budget.charge_value`."""
    budget = current_budget.get()
    if budget is not None:
        budget.charge_value(value)


def turns(values: Any) -> Iterator[Any]:
    """Yield values and charge one step for each."""
    for value in values:
        charge(STEP_WORK)
        yield value


def check_format(form: str) -> None:
    """Refuse a format text that could print far more than its values.

    Args:
        form: Left side of `%`, or the text of `.format`.

    Raises:
        ChatTemplateError: If it holds a large width, or one given as a value.
    """
    if re.search(r"\d{4,}|\*|\{[^{}]*\{", form):
        raise ChatTemplateError(
            f"the chat template formats with {form[:80]!r}; widths over 999 and widths given as values are refused."
        )


def charge_replace(text: Any, old: Any, new: Any) -> None:
    """Charge the size of a text in which `old` becomes `new`, before it is made."""
    charge(len(str(text)) + str(text).count(str(old)) * len(str(new)))


def charge_join(values: list[Any], separator: Any) -> None:
    """Charge the size of joined values, before they are joined."""
    charge(len(values) * (1 + len(str(separator))))
    for value in values:
        charge_value(value)

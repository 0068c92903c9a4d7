"""The filters and tests that chat templates may use, each paying for its work before it does it.

Entry points: `bounded_filters` and `bounded_tests`. Names with an underscore are the hooks that
the sandbox puts around a template's own operations.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from types import GeneratorType
from typing import Any

import jinja2

from dew.data.template_budget import (
    STEP_WORK,
    ChatTemplateError,
    charge,
    charge_join,
    charge_replace,
    charge_value,
    check_format,
    turns,
)

# Lazy filters pay a turn for each value they yield; constant-time ones pay one step.
_LAZY_FILTERS = ("map", "select", "reject", "selectattr", "rejectattr", "items")
_SHORT_FILTERS = ("length", "count", "first", "last", "default", "d", "attr")
_WHOLE_FILTERS = (
    *("abs", "capitalize", "dictsort", "escape", "e", "float", "groupby", "int", "list", "lower"),
    *("max", "min", "reverse", "round", "safe", "sort", "string", "title", "trim", "truncate"),
    *("unique", "upper", "wordcount"),
)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML; model templates are written for plain json.dumps.
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise ChatTemplateError(f"tojson(indent={indent!r}) is refused; use 0 to 16.")
    charge_value(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _prepare_arguments(name: str, value: Any, arguments: tuple, named: dict) -> Any:
    """Charge one filter call before it runs and return the value it may read."""
    charge(STEP_WORK)
    if name in _SHORT_FILTERS:
        return value
    if name in _LAZY_FILTERS:
        return value if name == "items" else turns(value)
    if isinstance(value, GeneratorType):
        value = list(turns(value))
    if name == "replace":
        charge_replace(value, *(list(arguments) + list(named.values()))[:2])
    elif name == "join":
        value = list(turns(value))
        charge_join(value, next(iter([*arguments, *named.values()]), ""))
    elif name == "indent":
        width = next(iter([*arguments, *named.values()]), 4)
        width = len(width) if isinstance(width, str) else int(width)
        charge(len(str(value)) + max(width, 0) * (str(value).count("\n") + 1))
    elif name == "format":
        check_format(str(value))
        charge_value((value, arguments, named))
    else:
        charge_value((value, arguments))
    return value


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it pays; asking for the context also keeps it out of constant folding."""
    wants = str(getattr(function, "jinja_pass_arg", ""))

    @jinja2.pass_context
    @functools.wraps(function)
    def filtered(context: Any, value: Any = "", *arguments: Any, **named: Any) -> Any:
        value = _prepare_arguments(name, value, arguments, named)
        if "eval_context" in wants:
            first: tuple[Any, ...] = (context.eval_ctx,)
        elif "environment" in wants:
            first = (context.environment,)
        else:
            first = (context,) if "context" in wants else ()
        return function(*first, value, *arguments, **named)

    # functools.wraps copied the inner function's own request; ours is the one that holds.
    return jinja2.pass_context(filtered)


def _concat(values: list[Any]) -> str:
    charge_value(values)
    return "".join(map(str, values))


def _checked(value: Any) -> Any:
    charge(STEP_WORK)
    charge_value(value)
    return value


def _searched(value: Any) -> Any:
    # Looking a key up costs the same in every dict.
    return value if isinstance(value, Mapping) else _checked(value)


def _sliced(value: Any) -> Any:
    charge(STEP_WORK + (len(value) if hasattr(value, "__len__") else 0))
    return value


def _metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a test such as `is eq` so that it pays for what it may compare."""
    wants = str(getattr(function, "jinja_pass_arg", ""))

    def tested(context: Any, value: Any, *arguments: Any, **named: Any) -> Any:
        charge(STEP_WORK)
        if arguments or named:
            charge_value((value, arguments, named))
        first = (context.environment,) if "environment" in wants else ()
        return function(*first, value, *arguments, **named)

    return jinja2.pass_context(tested)


def _without_context(function: Callable[..., Any]) -> Callable[..., Any]:
    def filtered(context: Any, *arguments: Any, **named: Any) -> Any:
        del context
        return function(*arguments, **named)

    return filtered


def bounded_filters(known: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Wrap the filters that chat templates use; all others are left out.

    Args:
        known: Jinja's filters by name.

    Returns:
        Filters by name, the sandbox's hooks among them.
    """
    allowed = (*_LAZY_FILTERS, *_SHORT_FILTERS, *_WHOLE_FILTERS, "replace", "join", "indent", "format")
    hooks: dict[str, Callable[..., Any]] = {
        "tojson": _to_json,
        "_concat": _concat,
        "_checked": _checked,
        "_searched": _searched,
        "_sliced": _sliced,
        "_text": _checked,
        "_turns": turns,
    }
    bounded = {name: _metered(name, known[name]) for name in allowed}
    return bounded | {name: jinja2.pass_context(_without_context(function)) for name, function in hooks.items()}


def bounded_tests(known: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Wrap the tests (`x is y`) of a template.

    Args:
        known: Jinja's tests by name.

    Returns:
        Tests by name.
    """
    return {name: _metered_test(test) for name, test in known.items()}

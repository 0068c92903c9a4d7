"""A Jinja sandbox in which a chat template from a stranger can neither hang nor fill memory.

Templates are rewritten as they compile: every loop turn, call, filter, comparison and piece of
output pays from one budget per rendering, so the bound is a count and not a clock.
Entry points: `compile_template` and `render_bounded`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType, GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dew.data.template_budget import (
    BASE_WORK,
    STEP_WORK,
    WORK_PER_INPUT_CHARACTER,
    Budget,
    ChatTemplateError,
    charge,
    charge_join,
    charge_replace,
    charge_value,
    check_format,
    current_budget,
    turns,
)
from dew.data.template_filters import bounded_filters, bounded_tests

MARK_START, MARK_END = "\ufdd0", "\ufdd1"
"""Unicode noncharacters that bracket a `{% generation %}` block while its place is looked up."""

MAX_SOURCE_CHARACTERS = 1_000_000

_marking: ContextVar[bool] = ContextVar("dew_template_marking", default=False)


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> Any:
    # A context-taking finalizer is never evaluated while the template compiles.
    del context
    if isinstance(value, GeneratorType):
        value = list(turns(value))
    charge_value(value)
    return value


class _Meter(NodeTransformer):
    """Puts the budget's hooks around loops, joins, comparisons and literal text."""

    def _hook(self, name: str, node: Any) -> nodes.Filter:
        hooked = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        return self._adopt(hooked, node)

    def _adopt(self, new: Any, old: nodes.Node) -> Any:
        assert old.environment is not None, "a parsed node belongs to an environment"
        return new.set_environment(old.environment)

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (Jinja calls it by this name)
        self.generic_visit(node)
        node.iter = self._hook("_turns", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        listed = nodes.List(node.nodes, lineno=node.lineno)
        return self._hook("_concat", self._adopt(listed, node))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._hook("_checked", node.expr)
        for operand in node.ops:
            is_search = operand.op in ("in", "notin")
            operand.expr = self._hook("_searched" if is_search else "_checked", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._hook("_sliced", node.node)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Filter:  # noqa: N802
        text = nodes.Const(node.data, lineno=node.lineno)
        return self._hook("_text", self._adopt(text, node))


class GenerationBlock(Extension):
    """Understands `{% generation %}`, which templates put around what the model itself writes."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{MARK_START}{caller()}{MARK_END}" if _marking.get() else caller()


class _TemplateDict:
    def __call__(self, *arguments: Any, **named: Any) -> dict:
        return dict(*arguments, **named)


class _Namespace(jinja2.utils.Namespace):
    # Underscore names would reach the namespace object's own internals.
    def __init__(*arguments: Any, **named: Any) -> None:
        self, *rest = arguments
        attributes = dict(*rest, **named)
        for name in attributes:
            _Namespace._check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check_name(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check_name(name: Any) -> None:
        if str(name).startswith("_"):
            raise ChatTemplateError(f"a template namespace may not hold the name {name!r}.")


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(f"the chat template refuses this chat: {message}")


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"%[^a-zA-Z%]", form):
        raise ChatTemplateError(f"strftime_now({form[:80]!r}) is refused; use plain % codes.")
    return datetime.now().strftime(form)


_GROWING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "translate"})


def _prepare_method(owner: str, name: str, arguments: tuple) -> tuple:
    """Charge one call of a text method before it runs and return its arguments."""
    if name in _GROWING_METHODS:
        raise ChatTemplateError(f"text.{name}() is not available in chat templates; use the template's own text.")
    if name == "replace" and len(arguments) >= 2:
        charge_replace(owner, *arguments[:2])
    elif name == "join" and arguments:
        values = list(turns(arguments[0]))
        charge_join(values, owner)
        return (values, *arguments[1:])
    charge_value((owner, arguments))
    return arguments


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with an allow-list of filters and a budget on every operation."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, loopcontrols],
            finalize=_finalize,
            optimized=False,
        )
        # Jinja's own annotations are narrower than what it accepts.
        plain: Any = self
        plain.filters, plain.tests = bounded_filters(plain.filters), bounded_tests(plain.tests)
        self.globals.pop("lipsum", None)
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _TemplateDict(),
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Meter().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charge a growing operator before it runs; text, lists and integers can all grow."""
        charge(STEP_WORK)
        if operator == "%" and isinstance(left, str):
            check_format(left)
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(count, int):
                    charge(len(value) * max(count, 0))
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > 1024:
                raise ChatTemplateError("a number in the chat template grew past 1024 bits.")
        if operator == "**" and not (abs(right) <= 64 and abs(left) < 2**16):
            raise ChatTemplateError(f"{left} ** {right} is refused in a chat template.")
        if operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            charge(len(left) + len(right))
        elif operator in "+%" and isinstance(left, str):
            charge_value((left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Check the widths in a text before its `format` runs; the sandbox checks the attributes."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def format_within_bounds(*arguments: Any, **named: Any) -> str:
            check_format(value.__self__)
            charge_value((value.__self__, arguments, named))
            return formatted(*arguments, **named)

        return format_within_bounds

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Charge a call before it runs; text methods pay for what they return."""
        charge(STEP_WORK)
        if isinstance(__obj, BuiltinMethodType):
            owner = __obj.__self__
            if isinstance(owner, str):
                args = _prepare_method(owner, __obj.__name__, args)
                charge_value(list(kwargs.values()))
            elif isinstance(owner, list | tuple):
                charge_value(owner)
        elif isinstance(__obj, LoopContext) and args and hasattr(args[0], "__len__"):
            charge(STEP_WORK * len(args[0]))
        return super().call(__context, __obj, *args, **kwargs)


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template in the sandbox.

    Args:
        source: Jinja source as checkpoints ship it.

    Returns:
        The template, for `render_bounded`.

    Raises:
        ChatTemplateError: If the source is too long, malformed, or uses a filter or an include
            that chat templates do not have.
    """
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are read."
        )
    try:
        return BoundedEnvironment().from_string(source)
    except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as error:
        raise ChatTemplateError(f"the chat template does not compile: {error}") from error


def render_bounded(
    template: jinja2.Template,
    variables: Mapping[str, Any],
    *,
    input_characters: int,
    mark_generation: bool = False,
) -> str:
    """Render a template within a budget that grows with the size of its input.

    Args:
        template: What `compile_template` returned.
        variables: Plain JSON values under the names the template reads.
        input_characters: Size of the input, in characters; sets the budget.
        mark_generation: Bracket `{% generation %}` blocks with `MARK_START` and `MARK_END`.

    Returns:
        The rendered text.

    Raises:
        ChatTemplateError: If the template refuses its input, fails, or exceeds the budget.
    """
    budget = Budget(BASE_WORK + WORK_PER_INPUT_CHARACTER * input_characters)
    budget_token, marking_token = (
        current_budget.set(budget),
        _marking.set(mark_generation),
    )
    try:
        return template.render(dict(variables))
    except ChatTemplateError:
        raise
    except (jinja2.TemplateError, RecursionError, ArithmeticError, MemoryError) as error:
        raise ChatTemplateError(f"the chat template failed: {error}") from error
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ChatTemplateError(f"the chat template failed on this chat: {error}") from error
    finally:
        current_budget.reset(budget_token)
        _marking.reset(marking_token)

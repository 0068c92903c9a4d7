"""The command line of the tables of laws over meshes: which cases to run, a line for each, what all of them come to.

Entry points: `table_parser`, `chosen`, `judged`, `tally`.
"""

from __future__ import annotations

import argparse
import collections
import os
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from dew.placement import AXES
from dew.simulated_devices import give_threads
from tools.compilation import bound_programs, simulation_flags
from tools.mesh_cases import DEVICES, Case, parse_factors

_WORDS = {"holds": "hold", "refused": "are refused as listed", "FAILS": "fail"}


class Verdict(Protocol):
    """What was found of a case."""

    @property
    def holds(self) -> bool:
        """Whether the law holds."""

    @property
    def words(self) -> str:
        """What was compared, in a few words."""

    @property
    def defects(self) -> list[str]:
        """What breaks the law beside that, a line each."""

    @property
    def seconds(self) -> float:
        """Time it took."""


V = TypeVar("V", bound=Verdict)


def table_parser(description: str | None) -> argparse.ArgumentParser:
    """Build a parser of the options that choose cases."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="which part of how many, as in 2/4")
    parser.add_argument("--mesh", help="one factorisation only, as in fsdp=4,sequence=2")
    parser.add_argument("--axis", action="append", choices=AXES, help="meshes that split this axis, or this one, ...")
    parser.add_argument("--without", action="append", default=[], choices=AXES, help="none that splits this axis")
    return parser


def selected(options: argparse.Namespace, cases: Sequence[Case]) -> list[Case]:
    """Choose the cases that the options ask for.

    Raises:
        ValueError: If an option cannot be read, or no case is left.
    """
    if options.axis:
        cases = [case for case in cases if any(getattr(case.factors, axis) > 1 for axis in options.axis)]
    cases = [case for case in cases if all(getattr(case.factors, axis) == 1 for axis in options.without)]
    if options.mesh:
        factors = parse_factors(options.mesh)
        cases = [case for case in cases if case.factors == factors]
    part, slash, parts = options.part.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"a part is written as in 2/4, from 1 on. Received: {options.part!r}")
    first, last = (len(cases) * number // int(parts) for number in (int(part) - 1, int(part)))
    if first == last:
        raise ValueError("no case is left of what was asked for")
    return cases[first:last]


def chosen(
    parser: argparse.ArgumentParser, arguments: list[str] | None, table: Callable[[argparse.Namespace], Sequence[Case]]
) -> list[Case]:
    """Read the command line, simulate devices where none are named, and choose from a table.

    Args:
        parser: What `table_parser` built.
        arguments: Words of the command line; None takes those of the process.
        table: Gives all cases by the options.

    Raises:
        SystemExit: With status 2, if an option cannot be read or no case is left.
    """
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_FLAGS", " ".join(simulation_flags(DEVICES)))
    give_threads()
    try:
        return selected(options, table(options))
    except ValueError as error:
        parser.error(str(error))


def judged(case: Case, judge: Callable[[Case], V]) -> V | None:
    """Judge a case and print a line; None where it raises."""
    try:
        verdict = judge(case)
    except Exception as error:  # whatever a legal case raises is a defect, and the others are still to be seen
        print(f"FAILS   {case}: {type(error).__name__}: {error}", flush=True)
        return None
    state = "holds" if verdict.holds else "FAILS"
    print(f"{state:7} {case!s:100} {verdict.words} ({verdict.seconds:.1f} s)", flush=True)
    for defect in verdict.defects:
        print(f"        {defect}", flush=True)
    bound_programs()
    return verdict


def tally(states: Sequence[str]) -> str:
    """Say how many cases hold, are refused as listed and fail."""
    counts = collections.Counter(states)
    return f"{len(states)} cases: " + ", ".join(f"{counts[state]} {words}" for state, words in _WORDS.items())

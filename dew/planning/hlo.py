"""Optimised HLO as text: its computations, and every instruction that runs with the trip counts of its loops.

Entry points: `computations`, `running_instructions`, `array_shapes`. XLA's own cost analysis counts a loop's body once;
what is counted from here counts it as often as it runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"\b(?:calls|body|to_apply|called_computations|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')

Trips = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name: Its name, which other instructions of the computation refer to.
        opcode: `dot`, `all-gather-start`, `while`, ...
        result: Type of its result, as written.
        line: The whole line.
        computation: Name of the computation it is in.
    """

    name: str
    opcode: str
    result: str
    line: str
    computation: str

    @property
    def op_name(self) -> str:
        """Where it comes from, as JAX named it, or the empty string."""
        named = _OP_NAME.search(self.line)
        return named[1] if named else ""

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of its operands, in order."""
        start = self.line.index(f" {self.opcode}(") + len(self.opcode) + 2
        depth, end = 1, start
        while depth and end < len(self.line):
            depth += {"(": 1, ")": -1}.get(self.line[end], 0)
            end += 1
        # An operand may be written with its type before its name, which has a percent sign or is the last word.
        parts = re.split(r",(?![^\[\{(]*[\]\})])", self.line[start : end - 1])
        return tuple(part.split()[-1].lstrip("%") for part in parts if part.strip())


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Split a module into its computations.

    Args:
        text: The module, as `compiled.as_text()` gives it.

    Returns:
        Instructions by the computation's name, and the name of the one that the program starts with.

    Raises:
        ValueError: If the text has no entry computation.
    """
    found: dict[str, list[Instruction]] = {}
    entry = current = None
    for line in text.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            current = opened[2]
            found[current] = []
            entry = current if opened[1] else entry
        elif current is not None and (parsed := _INSTRUCTION.match(line)):
            result, opcode = _split_result(parsed[2])
            found[current].append(Instruction(parsed[1], opcode, result, line, current))
    if entry is None:
        raise ValueError("The text has no ENTRY computation: give the output of compiled.as_text().")
    return found, entry


def _split_result(rest: str) -> tuple[str, str]:
    """Split `(f32[2], s32[]) while(...)` into the result's type and the opcode."""
    depth = 0
    for index, character in enumerate(rest):
        depth += character in "([{"
        depth -= character in ")]}"
        if character == " " and depth == 0:
            opcode = re.match(r"[\w\-]+", rest[index + 1 :])
            return rest[:index], opcode[0] if opcode else ""
    return rest, ""


def running_instructions(
    found: Mapping[str, list[Instruction]], entry: str, trips: Trips = ()
) -> Iterator[tuple[Instruction, Trips]]:
    """Visit every instruction that runs, those of fusions, loops and every branch of a conditional too.

    Args:
        found: Instructions by computation.
        entry: Where to begin.
        trips: Trip counts of the loops around it.

    Yields:
        The instruction, and the trip count of each loop around it, outermost first; None where the compiler does not
        know it.
    """
    for instruction in found.get(entry, ()):
        yield instruction, trips
        inner = trips
        if instruction.opcode == "while":
            known = _TRIPS.search(instruction.line)
            inner = (*trips, int(known[1]) if known else None)
        for called in _CALLED.findall(instruction.line):
            for target in re.findall(r"[\w.\-]+", called):
                yield from running_instructions(found, target, inner)


def array_shapes(result: str) -> list[tuple[str, tuple[int, ...]]]:
    """Read the arrays of a result's type.

    Args:
        result: For example `(f32[2,3]{1,0}, s32[])`.

    Returns:
        Element type and shape of each array.
    """
    return [(dtype, tuple(int(size) for size in dims.split(",") if size)) for dtype, dims in _SHAPE.findall(result)]

"""The console script: `dew COMMAND ...`. Commands are listed in `COMMANDS`, one file each.

Entry point: `main`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import tyro

from dew.tree import closest

COMMANDS = {
    "plan": ("dew.cli.plan", "plan_checkpoint", "bytes per device of a checkpoint on a mesh, before it is loaded"),
    "convert": ("dew.cli.convert", "convert_checkpoint", "write any checkpoint as a Hugging Face directory"),
}
"""Command to the module and the function that runs it, and what it does."""
PLANNED = ("launch", "runs", "tokenize", "verify")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Words after `dew`; None takes the process's own.

    Returns:
        The exit status: 0 done, 1 refused, 2 not understood.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name in PLANNED:
        print(f"{name!r} is not there yet; the commands are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    if name not in COMMANDS:
        guess = closest(name, COMMANDS)
        hint = f" Did you mean {guess!r}?" if guess else ""
        print(f"Unknown command {name!r}; the commands are {', '.join(COMMANDS)}.{hint}", file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]
    command: Callable[..., int] = getattr(import_module(module), function)
    try:
        return tyro.cli(command, prog=f"dew {name}", args=rest)
    except (ValueError, TypeError, OSError) as error:
        # What a person can put right is told in one line, without the way through our code.
        print(f"dew {name}: {error}", file=sys.stderr)
        return 1


def usage() -> str:
    """List the commands."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(["usage: dew COMMAND ...", "", *lines, "", "dew COMMAND --help lists a command's options"])


if __name__ == "__main__":
    sys.exit(main())

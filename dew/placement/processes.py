"""Join the pool of processes that run one program: `initialize`, before any array exists.

This file and the command line are the engine's only readers of the environment.
"""

from __future__ import annotations

import os

import jax

__all__ = ["initialize", "is_primary"]

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "DEW_PROCESS_COUNT", "DEW_PROCESS_ID")


def initialize() -> bool:
    """Join the pool that the environment describes, or do nothing outside one.

    Returns:
        True when this process joined, or had joined, a pool.

    Raises:
        ValueError: If the environment describes a pool in part, or with numbers that do not fit.
    """
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if "DEW_PROCESS_COUNT" not in given and "DEW_PROCESS_ID" not in given:
        return False
    missing = [name for name in _VARIABLES if name not in given]
    if missing:
        raise ValueError(f"The environment sets {sorted(given)} but not {missing}; a process pool needs all three.")
    address = given["JAX_COORDINATOR_ADDRESS"]
    count, index = _integer("DEW_PROCESS_COUNT", given), _integer("DEW_PROCESS_ID", given)
    if count < 1 or not 0 <= index < count:
        raise ValueError(
            "A process pool needs DEW_PROCESS_COUNT >= 1 and 0 <= DEW_PROCESS_ID < DEW_PROCESS_COUNT. "
            f"Received: DEW_PROCESS_COUNT={count}, DEW_PROCESS_ID={index}"
        )
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(coordinator_address=address, num_processes=count, process_id=index)
    return True


def _integer(name: str, given: dict[str, str]) -> int:
    try:
        return int(given[name])
    except ValueError as error:
        raise ValueError(f"{name} must be an integer. Received: {given[name]!r}") from error


def is_primary() -> bool:
    """Say whether this process is the one that prints and commits: process 0."""
    return jax.process_index() == 0

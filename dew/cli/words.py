"""What people type: mesh factors and byte counts.

Entry points: `mesh_factors`, `byte_count`.
"""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def mesh_factors(text: str) -> dict[str, int]:
    """Read `fsdp=4,tensor=2`.

    Args:
        text: Axis and factor pairs; the empty string is all devices on data.

    Returns:
        Axis to factor.

    Raises:
        ValueError: If a part is no pair, a factor is no integer or an axis repeats.
    """
    factors: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = (word.strip() for word in part.partition("="))
        if not re.fullmatch(r"\d+", size) or not name or name in factors:
            raise ValueError(f"A mesh is written axis=factor,axis=factor, as in fsdp=4,tensor=2. Received: {text!r}")
        factors[name] = int(size)
    return factors


def byte_count(text: str) -> int:
    """Read a byte count such as `80GB` (decimal) or `16GiB` (binary).

    Args:
        text: A number and a unit.

    Returns:
        Bytes.

    Raises:
        ValueError: If it is no number with a known unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"A byte count is a number and a unit, as in 80GB or 16GiB. Received: {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])

"""Which row lengths near a refused one work: found by trying them, so that what is advised is what is accepted.

Entry points: `nearest_lengths`, `length_advice`.
"""

from collections.abc import Callable


def nearest_lengths(length: int, accepts: Callable[[int], bool], *, step: int, largest: int) -> tuple[int, ...]:
    """Find the nearest lengths that work, one below and one above.

    Args:
        length: The refused length.
        accepts: Says whether a length works.
        step: Lengths that work are multiples of it.
        largest: The longest to try.

    Returns:
        Those found, the shorter one first.
    """
    below = range((min(length - 1, largest)) // step * step, 0, -step)
    above = range(length // step * step + step, largest + 1, step)
    found = (next(filter(accepts, candidates), None) for candidates in (below, above))
    return tuple(size for size in found if size is not None)


def length_advice(length: int, accepts: Callable[[int], bool], *, step: int, largest: int) -> str | None:
    """Say in words which lengths work; None where none does. Arguments as `nearest_lengths`'."""
    found = nearest_lengths(length, accepts, step=step, largest=largest)
    return f"rows of {' or '.join(map(str, found))} positions" if found else None

"""Ctrl-C between two steps instead of inside one: a step consumes the weights before it, so half of one loses them.

Entry point: `InterruptGate`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class InterruptGate:
    """While entered, holds an interrupt that comes inside `hold` back until it ends.

    Does nothing outside the main thread, where Python delivers no signals, and where somebody else than Python
    handles them.
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._is_holding = False
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> InterruptGate:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Finish what is inside before an interrupt is raised."""
        self._is_holding = True
        try:
            yield
        finally:
            self._is_holding = False
            held, self._held = self._held, None
            if held is not None and self._previous is not None:
                self._previous(*held)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding:
            self._held = (number, frame)
        else:
            assert self._previous is not None, "installed only over a handler"
            self._previous(number, frame)

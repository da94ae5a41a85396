"""Ctrl-C at a place of our choosing: between two tokens, never inside an import, a copy or a commit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interruptible:
    """A block in which the first Ctrl-C asks to stop and the second stops at once.

    The block polls ``requested`` where it can stop cleanly. A second Ctrl-C raises KeyboardInterrupt
    wherever the program is.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interruptible:
        self._previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def ending_at_once() -> Iterator[None]:
    """A block in which Ctrl-C ends the program as the system does it, for heavy imports with nothing to save yet.

    As an exception it would get lost there: torch takes one that stops numpy's import for a missing numpy, and
    goes on without.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)

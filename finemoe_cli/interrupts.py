"""Ctrl-C at a place of our choosing: between two tokens, never inside a copy or a commit."""

from __future__ import annotations

import signal
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

"""Virtual time of one link beside one computing device: what moves while a layer computes, and what it waits for.

Replays and live engines under a virtual clock share it, which is what lets their counts be compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.hardware import Hardware

_INSTANT = 1e-12


class LinkClock:
    """One transfer at a time: prefetches move under compute, and stop at the end of a piece for decided loads.

    Args:
        start_next: start the most valuable copy nobody waits for by calling ``start``; False if there is none.
        finish: the copy under way has arrived.
    """

    def __init__(self, hardware: Hardware, start_next: Callable[[], bool], finish: Callable[[], None]) -> None:
        self._hardware = hardware
        self._start_next = start_next
        self._finish = finish
        self._copy = hardware.copy_seconds
        self._read = hardware.expert_bytes / hardware.bandwidth
        self._remaining = 0.0
        self._moving = False
        self._busy = 0.0
        self.stall = 0.0
        self.copies = self.reads = 0

    @property
    def bytes_moved(self) -> int:
        """Of copies that have arrived and of experts read in place."""
        return (self.copies + self.reads) * self._hardware.expert_bytes

    def start(self) -> None:
        """A copy nobody waits for begins."""
        self._moving = True
        self._remaining = self._copy

    def compute(self, seconds: float) -> None:
        """The device computes; whatever is to be copied moves meanwhile."""
        while seconds > 0 and (self._moving or self._start_next()):
            step = min(seconds, self._remaining)
            self._move(step)
            seconds -= step

    def wait_for_arrival(self) -> None:
        """The layer needs the expert that is on its way."""
        self.stall += self._remaining
        self._move(self._remaining)

    def wait_for_next(self) -> None:
        """The layer needs a copy that comes after the one on its way, or is the next one to start.

        Raises:
            RuntimeError: nothing is on its way and nothing can start.
        """
        if not (self._moving or self._start_next()):
            raise RuntimeError("a layer waits for a copy that cannot start")
        self.wait_for_arrival()

    def wait_for_piece(self) -> None:
        """The layer needs another expert than the one on its way: the piece that has begun ends first."""
        if self._moving and self._hardware.chunk_bytes:
            rest = self._remaining % self._hardware.chunk_seconds
            self.stall += rest
            self._move(rest)

    def load(self, count: int) -> None:
        """The layer waits for whole copies of absent experts."""
        self.copies += count
        self._busy += count * self._copy
        self.stall += count * self._copy

    def read_in_place(self, count: int) -> None:
        """The layer reads experts over the link where they lie; copies take half of it meanwhile."""
        left = count * self._read
        self.reads += count
        self._busy += left
        while left > 0 and (self._moving or self._start_next()):
            step = min(left, self._remaining)
            self._move(step)
            left -= step
            self.stall += 2 * step
        self.stall += left

    def check(self) -> None:
        """Conservation: the link was busy for just what moved.

        Raises:
            RuntimeError: it was not, which would be a fault of the caller.
        """
        expected = self.copies * self._copy + self.reads * self._read
        if self._moving:
            expected += self._copy - self._remaining
        if abs(self._busy - expected) > 1e-6 * max(expected, 1.0):
            raise RuntimeError(f"the link was busy for {self._busy} s, but its transfers take {expected} s")

    def _move(self, seconds: float) -> None:
        self._busy += seconds
        self._remaining -= seconds
        if self._remaining <= _INSTANT:
            self._remaining = 0.0
            self._moving = False
            self.copies += 1
            self._finish()

"""The order in which experts cross the link: decided loads first, then prefetches by priority."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.selection import prefetch_priority


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A load nobody waits for yet.

    Attributes:
        key: flat expert key.
        due: position at which its gate decides: ``iteration * L + layer``.
        probability: what the matched map gives the expert at that layer.
    """

    key: int
    due: int
    probability: float


class TransferQueue:
    """Pending loads of one link. Not locked: its owner holds one lock around every call.

    While a decided load is pending or being carried out, no prefetch is handed out (paper section
    4.3: on a miss all prefetching waits). Prefetches are merged by expert, keep the larger
    probability, are ranked anew at every ``next_prefetch`` by ``p / (l - l_now)`` and leave only when
    they are handed out, overtaken by a decided load of the same expert, or past their layer.
    """

    def __init__(self) -> None:
        self._decided: deque[int] = deque()
        self._in_progress: set[int] = set()
        self._prefetches: dict[int, Prefetch] = {}

    def __len__(self) -> int:
        return len(self._decided) + len(self._prefetches)

    @property
    def has_prefetches(self) -> bool:
        return bool(self._prefetches)

    @property
    def paused(self) -> bool:
        """Whether prefetching waits for decided loads."""
        return bool(self._decided or self._in_progress)

    def decide(self, keys: Iterable[int]) -> None:
        """A gate chose absent experts: load them at once, in this order."""
        for key in keys:
            self.withdraw(key)
            self._decided.append(key)

    def withdraw(self, key: int) -> None:
        """No longer prefetch an expert: a decided load has overtaken it."""
        self._prefetches.pop(key, None)

    def offer(self, prefetches: Iterable[Prefetch]) -> None:
        for new in prefetches:
            old = self._prefetches.get(new.key)
            if old is None or old.due < new.due or old.probability < new.probability:
                self._prefetches[new.key] = new

    def next_decided(self) -> int | None:
        """The decided load that is to start now; ``finish`` ends it."""
        if not self._decided:
            return None
        key = self._decided.popleft()
        self._in_progress.add(key)
        return key

    def finish(self, key: int) -> None:
        self._in_progress.discard(key)

    def postpone(self, key: int) -> None:
        """Put a started decided load back to the front: no slot was to be had."""
        self._in_progress.discard(key)
        self._decided.appendleft(key)

    def next_prefetch(self, now: int, wanted: Callable[[int], bool]) -> Prefetch | None:
        """The most urgent prefetch, or None while decided loads are pending.

        Args:
            now: position of the layer whose gate decided last.
            wanted: whether an expert still has to be loaded; others are dropped.
        """
        if self.paused:
            return None
        for key in [k for k, p in self._prefetches.items() if p.due <= now or not wanted(k)]:
            del self._prefetches[key]
        if not self._prefetches:
            return None
        best = max(self._prefetches.values(), key=lambda p: prefetch_priority(p.probability, p.due - now))
        return self._prefetches.pop(best.key)

    def drop_prefetches(self) -> None:
        """Whoever wanted them has no use for them any more."""
        self._prefetches.clear()

    def drop_decided(self) -> None:
        """The layer that decided is done, or abandoned: prefetching goes on."""
        self._decided.clear()
        self._in_progress.clear()

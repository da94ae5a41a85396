"""Which experts a replayed device holds: recency, eviction and the bounds nobody may cross."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np

from engine.eviction import EvictionRule, LeastRecentlyUsed


class Residents:
    """The counterpart of ``ExpertCache`` for replays: whole layers at a time, no slots, no pins to undo.

    It decides what ``ExpertCache`` decides: the lowest value goes first, the least recent use breaks ties. A load
    under way takes room from its start.

    Args:
        experts: J, by which keys are told apart by layer.
        capacity: experts held at most. ``partitions`` divide it evenly.
        partitions: 1 for one cache of all layers, L for a share each.
    """

    def __init__(self, rule: EvictionRule, experts: int, capacity: int, partitions: int = 1) -> None:
        self._experts = experts
        self._partitions = partitions
        self._share = capacity // partitions
        self.capacity = self._share * partitions
        # A dict keeps its keys in order: least recent use first.
        self._recency: list[dict[int, None]] = [{} for _ in range(partitions)]
        self.rule = rule
        self._unused: set[int] = set()
        self.loading: int | None = None
        self.wasted = 0

    @property
    def rule(self) -> EvictionRule:
        """Chooses who goes; may be exchanged for another that knows what is held."""
        return self._rule

    @rule.setter
    def rule(self, rule: EvictionRule) -> None:
        self._rule = rule
        self._by_recency = isinstance(rule, LeastRecentlyUsed)

    def keys(self) -> list[int]:
        """The experts held, loading ones included."""
        return [key for recency in self._recency for key in recency]

    def __len__(self) -> int:
        return sum(map(len, self._recency))

    def partition(self, key: int) -> dict[int, None]:
        """The keys, loading ones included, that share their room with ``key``."""
        return self._recency[key // self._experts if self._partitions > 1 else 0]

    def holds(self, key: int) -> bool:
        """Whether the expert is resident or on its way."""
        return key in self.partition(key)

    def touch(self, keys: Sequence[int]) -> None:
        """Experts that hold room are used now."""
        for key in keys:
            recency = self.partition(key)
            del recency[key]
            recency[key] = None
            self._unused.discard(key)

    def admit(self, keys: Sequence[int], pinned: Collection[int]) -> Collection[int]:
        """Take experts of one layer that a gate has decided, evicting others; of ``pinned`` only if nothing else is.

        Returns:
            those the layer still reads: all of ``pinned``, or the last of them where they had to take turns.

        Raises:
            RuntimeError: they find no room; replays refuse such capacities beforehand.
        """
        if not keys:
            return pinned
        recency = self.partition(keys[0])
        if len(recency) + len(keys) <= self._share:
            for key in keys:
                self._hold(recency, key)
            return pinned
        pinned = set(pinned)
        pending = list(keys)
        while pending:
            victims = self._victims(recency, len(recency) + len(pending) - self._share, pinned)
            room = self._share - len(recency) + len(victims)
            if not room:
                if not pinned:
                    raise RuntimeError(f"{len(pending)} experts found no room among {self._share}")
                # More experts than room in one layer: those computed already make way.
                pinned.clear()
                continue
            group, pending = pending[:room], pending[room:]
            for victim in victims:
                self._evict(recency, victim)
            for key in group:
                self._hold(recency, key)
            pinned.update(group)
        self._check(recency)
        return pinned

    def admit_speculatively(self, key: int, value: float, pinned: Collection[int], decided: bool = False) -> bool:
        """Take an expert nobody waits for, unless whatever it would evict is worth more than ``value``.

        ``decided``: a gate has chosen it nevertheless, so it counts as used.
        """
        recency = self.partition(key)
        if len(recency) >= self._share:
            victims = self._victims(recency, 1, pinned, value)
            if not victims:
                return False
            self._evict(recency, victims[0])
        self._hold(recency, key)
        if not decided:
            self._unused.add(key)
        self._check(recency)
        return True

    def _victims(
        self, recency: dict[int, None], count: int, pinned: Collection[int], at_most: float = np.inf
    ) -> list[int]:
        """The ``count`` experts worth least, the least recent first; fewer where others are pinned or worth more."""
        if self._by_recency:
            free = (key for key in recency if key not in pinned and key != self.loading)
            return list(islice(free, count))
        keys = np.fromiter(recency, np.int64, len(recency))
        values = self._rule.values(keys)
        for key in pinned if self.loading is None else (*pinned, self.loading):
            values[keys == key] = np.inf
        lowest = [int(values.argmin())] if count == 1 else values.argsort(kind="stable")[:count].tolist()
        return [int(keys[i]) for i in lowest if values[i] < np.inf and values[i] <= at_most]

    def _hold(self, recency: dict[int, None], key: int) -> None:
        recency[key] = None
        self._rule.record_load(key)

    def _evict(self, recency: dict[int, None], victim: int) -> None:
        del recency[victim]
        self._rule.record_eviction(victim)
        if victim in self._unused:
            self._unused.remove(victim)
            self.wasted += 1

    def _check(self, recency: dict[int, None]) -> None:
        if len(recency) > self._share:
            raise RuntimeError(f"{len(recency)} experts in room for {self._share}")

"""Which expert is in which device slot: residency, pins and eviction, without a byte of data.

Experts are named by flat keys ``layer * J + expert``. The class is not locked: its owner, the
``TransferEngine``, holds one lock around every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from engine.eviction import EvictionRule


class Residency(IntEnum):
    """Where an expert is."""

    ABSENT = 0
    LOADING = 1
    RESIDENT = 2


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot promised to an expert, and the expert that had to leave it."""

    key: int
    slot: int
    evicted: int | None
    evicted_unused: bool


class ExpertCache:
    """Residency of experts in ``slots`` equal device slots.

    A pinned expert (the running layer still needs it) and a loading one are never evicted, and a
    speculative load never evicts an expert worth more than itself (DESIGN section 4).

    Args:
        partitions: 1 for one cache of all layers, L for an equal share of the slots for each.
    """

    def __init__(self, num_keys: int, slots: int, rule: EvictionRule, partitions: int = 1) -> None:
        self.rule = rule
        self._share = slots // partitions
        self._keys_a_share = num_keys // partitions
        self._held = [0] * partitions
        slots = self._share * partitions
        self.slots = slots
        # Lists where the token loop looks up single experts, arrays where a victim is chosen among all slots.
        self._slot_of = [-1] * num_keys
        self._key_in = np.full(slots, -1, dtype=np.int64)
        self._loading = [False] * slots
        self._unused = [False] * slots
        self._pins = [0] * slots
        self._evictable = np.zeros(slots, dtype=bool)
        self._last_use = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._free = list(range(slots - 1, -1, -1))

    def residency(self, key: int) -> Residency:
        slot = self._slot_of[key]
        if slot < 0:
            return Residency.ABSENT
        return Residency.LOADING if self._loading[slot] else Residency.RESIDENT

    def slot(self, key: int) -> int:
        """The slot that holds or awaits the expert, -1 if none does."""
        return self._slot_of[key]

    def resident_keys(self) -> list[int]:
        return [key for key in self._key_in.tolist() if key >= 0 and not self._loading[self._slot_of[key]]]

    def loading_keys(self) -> list[int]:
        return [key for key in self._key_in.tolist() if key >= 0 and self._loading[self._slot_of[key]]]

    def occupied(self) -> int:
        """Slots that hold or await an expert; never more than ``slots``."""
        return self.slots - len(self._free)

    def replace(self, residents: Mapping[int, int]) -> None:
        """Hold these experts, key -> slot, least recent use first; nothing may be loading or pinned."""
        self._slot_of = [-1] * len(self._slot_of)
        self._key_in[:] = -1
        self._evictable[:] = False
        self._unused = [False] * self.slots
        self._held = [0] * len(self._held)
        for key, slot in residents.items():
            self._slot_of[key] = slot
            self._key_in[slot] = key
            self._evictable[slot] = True
            self._held[key // self._keys_a_share] += 1
            self._clock += 1
            self._last_use[slot] = self._clock
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if self._key_in[slot] < 0]

    def held_keys(self) -> list[int]:
        """Experts that hold or await a slot."""
        return [key for key in self._key_in.tolist() if key >= 0]

    def residents(self) -> dict[int, int]:
        """Key -> slot of the resident experts, least recent use first."""
        keys = self.resident_keys()
        keys.sort(key=lambda key: int(self._last_use[self._slot_of[key]]))
        return {key: self._slot_of[key] for key in keys}

    def record_use(self, keys: Sequence[int]) -> None:
        """The running layer routed to these experts: recency and frequency follow, resident or not."""
        self.rule.record_use(keys)
        for key in keys:
            slot = self._slot_of[key]
            if slot >= 0:
                self._clock += 1
                self._last_use[slot] = self._clock
                self._unused[slot] = False

    def pin(self, key: int) -> None:
        """Keep an expert that holds or awaits a slot until ``unpin``; pins count."""
        slot = self._slot_of[key]
        self._pins[slot] += 1
        self._evictable[slot] = False

    def unpin(self, key: int) -> None:
        slot = self._slot_of[key]
        if slot < 0 or self._pins[slot] <= 0:
            raise RuntimeError(f"expert {key} is not pinned")
        self._pins[slot] -= 1
        self._evictable[slot] = not self._pins[slot] and not self._loading[slot]

    def reserve(self, key: int, speculative_value: float | None = None, decided: bool = False) -> Reservation | None:
        """Give an absent expert a slot, evicting if all are taken.

        Args:
            speculative_value: worth of a load nobody waits for; None for one a gate has decided.
            decided: a gate has decided for it, although no more than its worth may make room.

        Returns:
            None where every slot is pinned, loading or (for speculation) worth more than the newcomer.
        """
        if self._slot_of[key] >= 0:
            raise RuntimeError(f"expert {key} already holds a slot")
        evicted: int | None = None
        unused = False
        partition = key // self._keys_a_share
        if self._held[partition] < self._share:
            slot = self._free.pop()
            self._held[partition] += 1
        else:
            victim = self._choose_victim(partition, speculative_value)
            if victim is None:
                return None
            slot = victim
            evicted = int(self._key_in[slot])
            unused = self._unused[slot]
            self._slot_of[evicted] = -1
            self.rule.record_eviction(evicted)
        self._slot_of[key] = slot
        self._key_in[slot] = key
        self._loading[slot] = True
        self._evictable[slot] = False
        self._unused[slot] = speculative_value is not None and not decided
        self._clock += 1
        self._last_use[slot] = self._clock
        self.rule.record_load(key)
        return Reservation(key, slot, evicted, unused)

    def commit(self, key: int) -> None:
        """The expert's bytes have arrived in its slot."""
        slot = self._slot_of[key]
        if slot < 0 or not self._loading[slot]:
            raise RuntimeError(f"expert {key} is not loading")
        self._loading[slot] = False
        self._evictable[slot] = not self._pins[slot]

    def release(self, key: int) -> None:
        """Free the slot of an expert whose load failed, pinned or not."""
        slot = self._slot_of[key]
        self._slot_of[key] = -1
        self._key_in[slot] = -1
        self._loading[slot] = False
        self._evictable[slot] = False
        self._pins[slot] = 0
        self._unused[slot] = False
        self._free.append(slot)
        self._held[key // self._keys_a_share] -= 1

    def _choose_victim(self, partition: int, speculative_value: float | None) -> int | None:
        evictable = self._evictable
        if len(self._held) > 1:
            evictable = evictable & (self._key_in // self._keys_a_share == partition)
        values = np.where(evictable, self.rule.values(self._key_in), np.inf)
        lowest = values.min()
        if lowest == np.inf or (speculative_value is not None and lowest > speculative_value):
            return None
        ties = np.flatnonzero(values == lowest)
        return int(ties[0] if len(ties) == 1 else ties[np.argmin(self._last_use[ties])])

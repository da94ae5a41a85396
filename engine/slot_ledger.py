"""The life of a device slot while kernels find experts through a table of addresses.

The device runs one token after the other, and no token waits for the host. Its kernels read the table at any moment
of a token and the bytes behind an entry until the token ends. The host queues two kinds of work on one copy stream,
which carries them out in order: an expert's bytes into a slot with the switch of its entry behind them, and the
switch of an entry back to the expert's page-locked host memory. A slot goes round through four states:

    FREE      nothing points to it and no running token can have read an entry that did.
              admit: a fill is queued                                                     -> FILLING
    FILLING   its bytes are being written; the expert's entry still points to host memory.
              poll: the copy stream is past the bytes and the switch behind them          -> SWITCHED
    SWITCHED  the entry points to the slot, whose bytes nobody writes.
              admit, of an expert that takes its place: the switch back is queued         -> RETIRED
    RETIRED   the entry points, or will soon point, to host memory.
              poll: the copy stream is past the switch back. Any token handed to the device so far may have read the
              old entry, so the slot is fenced by the boundary of the last of them; later ones read the new entry.
              poll: that boundary has passed                                              -> FREE

A token boundary passes when a token has ended; tokens end in the order they were handed over. What the host knows of
boundaries is always old: the device may be past them and in the next token. That is why the fence counts the tokens
handed over, which the host knows exactly, and why they are counted only after the switch back has been seen done.

So no slot is written while an entry that a running token may have read points to it, and no entry ever points to
bytes that are not there.

Since a retired slot is of no use for about a token, ``spare`` slots are kept out of the experts' count: a newcomer
takes a free one at once while its victim's slot retires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from engine.cache import Reservation
from engine.eviction import EvictionRule


class SlotState(IntEnum):
    """Where a slot stands in its life."""

    FREE = 0
    FILLING = 1
    SWITCHED = 2
    RETIRED = 3


class CopyStream(Protocol):
    """Carries out copies one after the other. Every call that queues work returns its ticket, counted from 1."""

    def fill(self, key: int, slot: int) -> int:
        """Queue an expert's bytes into a slot and, behind them, the switch of its entry to the slot."""
        ...

    def point_home(self, key: int) -> int:
        """Queue the switch of an expert's entry back to host memory."""
        ...

    def completed(self) -> int:
        """The last ticket that is done; those before it are, too."""
        ...


class TokenClock(Protocol):
    """Counts tokens; both counts only grow."""

    def handed_over(self) -> int:
        """Tokens the device was given to run, counted before it can begin them."""
        ...

    def ended(self) -> int:
        """Tokens known to have ended; the device may be further."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending:
    """A slot whose next state waits for the copy stream."""

    ticket: int
    slot: int


@dataclass(frozen=True, slots=True)
class _Fenced:
    """A retired slot that is free once so many tokens have ended."""

    tokens: int
    slot: int


class SlotLedger:
    """Books the states of ``slots`` equal slots and queues the copies that change them. Used by one thread.

    The eviction rule chooses who retires: the lowest value first, the least recent use among equals.

    Args:
        num_keys: experts of all layers, by flat keys ``layer * J + expert``.
        spare: slots that hold no expert in the long run; 0 only where every expert has a slot.
        partitions: 1 for one cache of all layers, L for an equal share of the experts held for each.
    """

    def __init__(
        self,
        num_keys: int,
        slots: int,
        spare: int,
        rule: EvictionRule,
        copies: CopyStream,
        tokens: TokenClock,
        partitions: int = 1,
    ) -> None:
        self._share = (slots - spare) // partitions
        if self._share < 1 or (spare < 1 and slots < num_keys):
            raise ValueError(f"{spare} spare of {slots} slots in {partitions} parts for {num_keys} experts")
        self.slots = slots
        self._rule = rule
        self._copies = copies
        self._tokens = tokens
        self._keys_a_share = num_keys // partitions
        self._held = [0] * partitions
        self._slot_of = np.full(num_keys, -1, dtype=np.int64)
        self._key_in = np.full(slots, -1, dtype=np.int64)
        self._state = np.full(slots, SlotState.FREE, dtype=np.int8)
        self._unused = np.zeros(slots, dtype=bool)
        self._last_use = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._free = list(range(slots - 1, -1, -1))
        self._pending: deque[_Pending] = deque()
        self._fenced: deque[_Fenced] = deque()

    @property
    def capacity(self) -> int:
        """Experts that can be held for long."""
        return self._share * len(self._held)

    @property
    def copies_under_way(self) -> int:
        """Slots being filled."""
        return int(np.count_nonzero(self._state == SlotState.FILLING))

    @property
    def moving(self) -> bool:
        """Whether copies are queued that have not been seen done."""
        return bool(self._pending)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def state(self, slot: int) -> SlotState:
        return SlotState(int(self._state[slot]))

    def holder(self, key: int) -> int:
        """The slot that holds, awaits or only just held the expert; -1 if none does."""
        return int(self._slot_of[key])

    def is_filling(self, key: int) -> bool:
        slot = self._slot_of[key]
        return bool(slot >= 0 and self._state[slot] == SlotState.FILLING)

    def residents(self) -> dict[int, int]:
        """Key -> slot of the experts whose entries point to their slots, least recent use first."""
        slots = np.flatnonzero(self._state == SlotState.SWITCHED)
        slots = slots[np.argsort(self._last_use[slots], kind="stable")]
        return dict(zip(self._key_in[slots].tolist(), slots.tolist(), strict=True))

    def take_over(self, residents: Mapping[int, int]) -> dict[int, int]:
        """Start from slots that hold these experts, least recent use first, while no token runs and nothing is copied.

        Returns:
            those that stay: what is more than ``capacity`` loses its slot by the eviction rule. The table has to be
            written accordingly before the next token starts.
        """
        self._slot_of[:] = -1
        self._key_in[:] = -1
        self._state[:] = SlotState.FREE
        self._unused[:] = False
        self._held = [0] * len(self._held)
        self._pending.clear()
        self._fenced.clear()
        for key, slot in residents.items():
            self._hold(key, slot, SlotState.SWITCHED)
        for partition in range(len(self._held)):
            while self._held[partition] > self._share:
                victim = self._lowest(partition)
                assert victim is not None
                key = int(self._key_in[victim])
                self._held[partition] -= 1
                self._rule.record_eviction(key)
                self._drop(victim)
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if self._state[slot] == SlotState.FREE]
        return self.residents()

    def record_use(self, keys: Sequence[int]) -> None:
        """Experts of one layer were routed, resident or not."""
        self._rule.record_use(keys)
        for key in keys:
            slot = self._slot_of[key]
            if slot >= 0:
                self._clock += 1
                self._last_use[slot] = self._clock
                self._unused[slot] = False

    def admit(self, key: int, value: float, speculative: bool) -> Reservation | None:
        """Queue the fill of a slot for an expert that has none, retiring another expert if the count is reached.

        Args:
            value: what holding it is worth, on the scale of the rule's values.

        Returns:
            None where it has a slot or just had one, no slot is free yet, or all it could replace are worth more.
        """
        if self._slot_of[key] >= 0 or not self._free:
            return None
        partition = key // self._keys_a_share
        evicted: int | None = None
        unused = False
        if self._held[partition] >= self._share:
            victim = self._lowest(partition)
            if victim is None or float(self._rule.values(self._key_in[victim : victim + 1])[0]) > value:
                return None
            evicted, unused = int(self._key_in[victim]), bool(self._unused[victim])
            self._retire(victim)
        slot = self._free.pop()
        self._hold(key, slot, SlotState.FILLING)
        self._unused[slot] = speculative
        self._rule.record_load(key)
        self._pending.append(_Pending(self._copies.fill(key, slot), slot))
        return Reservation(key, slot, evicted, unused)

    def poll(self) -> list[int]:
        """Follow the copy stream and the token boundaries; return keys whose entries now point to their slots."""
        arrived = []
        if self._pending:
            completed = self._copies.completed()
            # Read after ``completed``: a token handed over between the two may have read an entry before its switch.
            handed_over = self._tokens.handed_over()
            while self._pending and self._pending[0].ticket <= completed:
                slot = self._pending.popleft().slot
                if self._state[slot] == SlotState.FILLING:
                    self._state[slot] = SlotState.SWITCHED
                    arrived.append(int(self._key_in[slot]))
                else:
                    self._fenced.append(_Fenced(handed_over, slot))
        ended = self._tokens.ended()
        while self._fenced and self._fenced[0].tokens <= ended:
            slot = self._fenced.popleft().slot
            self._drop(slot)
            self._free.append(slot)
        return arrived

    def _hold(self, key: int, slot: int, state: SlotState) -> None:
        self._slot_of[key] = slot
        self._key_in[slot] = key
        self._state[slot] = state
        self._held[key // self._keys_a_share] += 1
        self._clock += 1
        self._last_use[slot] = self._clock

    def _retire(self, slot: int) -> None:
        key = int(self._key_in[slot])
        self._state[slot] = SlotState.RETIRED
        self._held[key // self._keys_a_share] -= 1
        self._rule.record_eviction(key)
        self._pending.append(_Pending(self._copies.point_home(key), slot))

    def _drop(self, slot: int) -> None:
        self._slot_of[self._key_in[slot]] = -1
        self._key_in[slot] = -1
        self._state[slot] = SlotState.FREE
        self._unused[slot] = False

    def _lowest(self, partition: int) -> int | None:
        """The switched slot of the lowest value whose expert belongs to a partition."""
        slots = np.flatnonzero(self._state == SlotState.SWITCHED)
        if len(self._held) > 1:
            slots = slots[self._key_in[slots] // self._keys_a_share == partition]
        if not len(slots):
            return None
        values = self._rule.values(self._key_in[slots])
        ties = slots[values == values.min()]
        return int(ties[np.argmin(self._last_use[ties])])

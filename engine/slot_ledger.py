"""The books of device slots while kernels find experts through a table of addresses; see ``engine.slot_life``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from engine.cache import Reservation
from engine.eviction import EvictionRule
from engine.slot_life import CopyStream, Displaced, Landings, OrderBook, SlotState


class SlotLedger:
    """Books the states of ``slots`` equal slots, queues copies and leaves words for the device. Used by one thread.

    The eviction rule chooses who leaves: the lowest value first, the least recent use among equals.

    Args:
        num_keys: experts of all layers, by flat keys ``layer * J + expert``.
        spare: slots that hold no expert in the long run, for newcomers to be copied to while another leaves.
        partitions: 1 for one cache of all layers, L for an equal share of the experts held for each.
    """

    def __init__(
        self,
        num_keys: int,
        slots: int,
        spare: int,
        rule: EvictionRule,
        copies: CopyStream,
        orders: OrderBook,
        partitions: int = 1,
    ) -> None:
        self._share = (slots - spare) // partitions
        if self._share < 1:
            raise ValueError(f"{spare} spare of {slots} slots in {partitions} parts for {num_keys} experts")
        self.slots = slots
        self._ahead = 1
        self._rule = rule
        self._copies = copies
        self._orders = orders
        self._keys_a_share = num_keys // partitions
        self._held = [0] * partitions
        self._offered: list[deque[int]] = [deque() for _ in range(partitions)]
        self._slot_of = np.full(num_keys, -1, dtype=np.int64)
        self._key_in = np.full(slots, -1, dtype=np.int64)
        self._state = np.full(slots, SlotState.FREE, dtype=np.int8)
        self._unused = np.zeros(slots, dtype=bool)
        self._last_use = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._free = list(range(slots - 1, -1, -1))
        self._filling: deque[tuple[int, int]] = deque()
        self._ordered: deque[int] = deque()
        self._landing: list[int] = []

    @property
    def capacity(self) -> int:
        """Experts that can be held for long."""
        return self._share * len(self._held)

    @property
    def copies_under_way(self) -> int:
        """Slots being filled by the copy stream."""
        return len(self._filling)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def state(self, slot: int) -> SlotState:
        return SlotState(int(self._state[slot]))

    def holder(self, key: int) -> int:
        """The slot that holds, awaits or only just held the expert; -1 if none does."""
        return int(self._slot_of[key])

    def is_coming(self, key: int) -> bool:
        """Whether the expert was on its way to a slot by a copy that has not come to anything yet."""
        slot = self._slot_of[key]
        return bool(slot >= 0 and self._state[slot] in (SlotState.FILLING, SlotState.POINTING))

    def residents(self) -> dict[int, int]:
        """Key -> slot of the experts that are there once the device is idle, all is booked and no copy is under way,
        least recent use first."""
        there = (SlotState.HELD, SlotState.OFFERED, SlotState.LANDING, SlotState.POINTING)
        slots = np.flatnonzero(np.isin(self._state, there) & (self._key_in >= 0))
        slots = slots[self._slot_of[self._key_in[slots]] == slots]
        slots = slots[np.argsort(self._last_use[slots], kind="stable")]
        return dict(zip(self._key_in[slots].tolist(), slots.tolist(), strict=True))

    def take_over(self, residents: Mapping[int, int], ahead: int) -> dict[int, int]:
        """Start from slots that hold these experts, least recent use first, while no token runs and nothing is copied.

        Args:
            ahead: offers to keep open in each share of the cache, of which they take a quarter at most: the rule
                cannot think again about those it has given.

        Returns:
            those that stay: what is more than ``capacity`` loses its slot by the eviction rule. The table has to be
            written accordingly, and all words forgotten, before the next token starts.
        """
        self._ahead = max(1, min(ahead, self._share // 4))
        self._slot_of[:] = -1
        self._key_in[:] = -1
        self._state[:] = SlotState.FREE
        self._unused[:] = False
        self._held = [0] * len(self._held)
        self._filling.clear()
        self._ordered.clear()
        self._landing.clear()
        for offers in self._offered:
            offers.clear()
        for key, slot in residents.items():
            self._hold(key, slot, SlotState.HELD)
        for partition in range(len(self._held)):
            while self._held[partition] > self._share:
                victim = self._lowest(partition)
                assert victim is not None
                self._lose(victim)
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
        """Queue a copy for an expert that has no slot; another leaves if the count is reached.

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
        if self._held[partition] + self._empty_offers(partition) >= self._share:
            victim = self._lowest(partition)
            if victim is None or float(self._rule.values(self._key_in[victim : victim + 1])[0]) > value:
                return None
            evicted, unused = int(self._key_in[victim]), bool(self._unused[victim])
            self._lose(victim)
            self._state[victim] = SlotState.LEAVING
            self._orders.point_home(evicted, victim)
            self._ordered.append(victim)
        slot = self._free.pop()
        self._hold(key, slot, SlotState.FILLING)
        self._unused[slot] = speculative
        self._rule.record_load(key)
        self._filling.append((self._copies.fill(key, slot), slot))
        return Reservation(key, slot, evicted, unused)

    def poll(self) -> None:
        """Follow the copy stream: what has arrived is ordered to be pointed to."""
        if not self._filling:
            return
        completed = self._copies.completed()
        while self._filling and self._filling[0][0] <= completed:
            _, slot = self._filling.popleft()
            self._state[slot] = SlotState.POINTING
            self._orders.point(int(self._key_in[slot]), slot)
            self._ordered.append(slot)

    def book(self, layer_key: int, told: Landings) -> list[Displaced]:
        """Book what a layer's letter tells; ``layer_key`` is any key of the layer. Returns who lost a slot."""
        for slot in self._landing:
            self._state[slot] = SlotState.HELD
        self._landing.clear()
        displaced: list[Displaced] = []
        for place in range(told.orders_done):
            displaced += self._close_order(self._ordered.popleft(), void=bool(told.orders_void >> place & 1))
        offers = self._offered[layer_key // self._keys_a_share]
        for _ in range(told.offers_taken):
            slot = offers.popleft()
            key = told.landed.get(slot)
            if key is not None:
                displaced += self._land(key, slot)
            elif self._key_in[slot] >= 0:
                self._state[slot] = SlotState.HELD
            else:
                self._state[slot] = SlotState.FREE
                self._free.append(slot)
        return displaced

    def offer(self) -> None:
        """Keep offers open in every share: empty slots first, then those of the lowest value."""
        for partition, offers in enumerate(self._offered):
            while len(offers) < self._ahead:
                if self._free and self._held[partition] + self._empty_offers(partition) < self._share:
                    slot: int | None = self._free.pop()
                else:
                    slot = self._lowest(partition)
                if slot is None:
                    break
                self._state[slot] = SlotState.OFFERED
                self._orders.offer(partition, slot, int(self._key_in[slot]))
                offers.append(slot)

    def _land(self, key: int, slot: int) -> list[Displaced]:
        displaced: list[Displaced] = []
        if self._key_in[slot] >= 0:
            displaced.append(Displaced(int(self._key_in[slot]), bool(self._unused[slot])))
            self._lose(slot)
            self._drop(slot)
        self._hold(key, slot, SlotState.LANDING)
        self._unused[slot] = False
        self._rule.record_load(key)
        self._landing.append(slot)
        return displaced

    def _close_order(self, slot: int, void: bool) -> list[Displaced]:
        key = int(self._key_in[slot])
        pointing = self._state[slot] == SlotState.POINTING
        if pointing and not void:
            self._state[slot] = SlotState.HELD
            self._slot_of[key] = slot
            return []
        if pointing:
            self._held[key // self._keys_a_share] -= 1
        self._drop(slot)
        self._free.append(slot)
        return [Displaced(key, unused=True)] if pointing else []

    def _hold(self, key: int, slot: int, state: SlotState) -> None:
        self._slot_of[key] = slot
        self._key_in[slot] = key
        self._state[slot] = state
        self._held[key // self._keys_a_share] += 1
        self._clock += 1
        self._last_use[slot] = self._clock

    def _lose(self, slot: int) -> None:
        """Its expert does not count any longer."""
        key = int(self._key_in[slot])
        self._held[key // self._keys_a_share] -= 1
        self._rule.record_eviction(key)

    def _drop(self, slot: int) -> None:
        key = self._key_in[slot]
        if self._slot_of[key] == slot:
            self._slot_of[key] = -1
        self._key_in[slot] = -1
        self._state[slot] = SlotState.FREE
        self._unused[slot] = False

    def _empty_offers(self, partition: int) -> int:
        return sum(self._key_in[slot] < 0 for slot in self._offered[partition])

    def _lowest(self, partition: int) -> int | None:
        """The held slot of the lowest value whose expert belongs to a partition."""
        slots = np.flatnonzero(self._state == SlotState.HELD)
        if len(self._held) > 1:
            slots = slots[self._key_in[slots] // self._keys_a_share == partition]
        if not len(slots):
            return None
        values = self._rule.values(self._key_in[slots])
        ties = slots[values == values.min()]
        return int(ties[np.argmin(self._last_use[ties])])

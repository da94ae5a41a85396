"""The address table as the device keeps it, in plain Python: what the kernels are compared with, and what the ledger
is tried against. It checks at every step that nobody reads or points to bytes that are not there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.slot_life import Landings

HOME = -1
GARBAGE = -2


@dataclass
class Routes:
    """What one layer's ``resolve`` found: key -> slot or ``HOME``, and slot -> key of what lands."""

    read: dict[int, int]
    landing: dict[int, int]
    taken: int


@dataclass
class TableModel:
    """Slots, a table and words that the host has left, which become visible one by one."""

    slots: int
    keys: int
    partitions: int = 1
    batch: int = 16
    contents: list[int] = field(init=False)
    table: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.contents = [GARBAGE] * self.slots
        self.table = [HOME] * self.keys
        self.offers: list[deque[tuple[int, int]]] = [deque() for _ in range(self.partitions)]
        self.orders: deque[tuple[str, int, int]] = deque()
        self.copies: deque[tuple[int, int]] = deque()
        self.queued = self.done = 0
        self.running: Routes | None = None
        self.settled = (0, 0)
        self.letters: deque[tuple[int, Landings]] = deque()

    # What the host calls.

    def fill(self, key: int, slot: int) -> int:
        # The copy may start the moment it is queued: from now on nobody may look at the slot.
        assert slot not in self.table, "a slot is overwritten that an entry points to"
        assert self.running is None or slot not in {*self.running.read.values(), *self.running.landing}, (
            "a slot is overwritten that running kernels use"
        )
        self.contents[slot] = GARBAGE
        self.copies.append((key, slot))
        self.queued += 1
        return self.queued

    def completed(self) -> int:
        return self.done

    def offer(self, partition: int, slot: int, victim: int) -> None:
        self.offers[partition].append((slot, victim))

    def point(self, key: int, slot: int) -> None:
        self.orders.append(("point", key, slot))

    def point_home(self, key: int, slot: int) -> None:
        self.orders.append(("home", key, slot))

    # What the device does.

    def finish_copy(self) -> None:
        key, slot = self.copies.popleft()
        self.contents[slot] = key
        self.done += 1

    def resolve(self, keys: list[int], visible: int) -> Routes:
        """A layer's gate has decided for these keys, of one share; so many offers can be seen by now."""
        assert self.running is None
        offers = self.offers[keys[0] * self.partitions // self.keys]
        read = {key: self.table[key] for key in keys}
        routes = Routes(read, {}, 0)
        for key in dict.fromkeys(keys):
            if read[key] != HOME:
                assert self.contents[read[key]] == key, "an entry points to bytes that are not there"
            elif offers and routes.taken < visible:
                slot, victim = offers.popleft()
                routes.taken += 1
                if victim in keys:
                    continue
                if victim >= 0:
                    assert self.table[victim] == slot
                    self.table[victim] = HOME
                assert slot not in self.table
                self.contents[slot] = GARBAGE
                routes.landing[slot] = key
        self.letters.append((keys[0], Landings(dict(routes.landing), routes.taken, *self.settled)))
        self.running = routes
        return routes

    def settle(self, visible: int) -> None:
        """The layer's kernels have ended; so many orders can be seen by now."""
        assert self.running is not None
        for slot, key in self.running.landing.items():
            self.contents[slot] = key
            self.table[key] = slot
        self.running = None
        done = void = 0
        changed: set[int] = set()
        while self.orders and done < min(visible, self.batch) and self.orders[0][1] not in changed:
            kind, key, slot = self.orders.popleft()
            changed.add(key)
            if kind == "home":
                assert self.table[key] == slot
                self.table[key] = HOME
            elif self.table[key] == HOME:
                assert self.contents[slot] == key, "an entry is pointed to bytes that are not there"
                self.table[key] = slot
            else:
                void |= 1 << done
            done += 1
        self.settled = (done, void)

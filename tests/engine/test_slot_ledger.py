"""The protocol of device slots against an adversary: any order of host steps, copies, boundaries and table reads."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.eviction import LeastFrequentlyUsed, LeastRecentlyUsed
from engine.slot_ledger import SlotLedger, SlotState

L, J = 2, 4
KEYS = L * J
HOME = -1
GARBAGE = -2
AHEAD = 2


class Device:
    """Slots, a table, a copy stream and tokens that hold on to every entry they have read; it checks every step."""

    def __init__(self, slots: int) -> None:
        self.contents = [GARBAGE] * slots
        self.table = [HOME] * KEYS
        self.queue: deque[tuple[str, int, int]] = deque()
        self.queued = self.done = 0
        self.tokens_handed_over = self.tokens_ended = self.tokens_told = 0
        self.running = False
        self.read: dict[int, set[int]] = {}
        self.between: list[int] | None = None

    def fill(self, key: int, slot: int) -> int:
        # The copy may start the moment it is queued: from now on nobody may look at the slot.
        assert slot not in self.read, "a slot is overwritten that the running token may still read"
        assert slot not in self.table, "a slot is overwritten that an entry points to"
        self.contents[slot] = GARBAGE
        return self._queue("fill", key, slot)

    def point_home(self, key: int) -> int:
        return self._queue("home", key, HOME)

    def completed(self) -> int:
        done = self.done
        self._go_on()
        return done

    def handed_over(self) -> int:
        tokens = self.tokens_handed_over
        self._go_on()
        return tokens

    def ended(self) -> int:
        return self.tokens_told

    def step_copies(self) -> None:
        kind, key, slot = self.queue.popleft()
        if kind == "fill":
            self.contents[slot] = key
            self.queue.appendleft(("switch", key, slot))
            return
        self.table[key] = slot
        self.done += 1

    def read_entry(self, key: int) -> None:
        slot = self.table[key]
        if slot != HOME:
            assert self.contents[slot] == key, "an entry points to bytes that are not there"
            self.read.setdefault(slot, set()).add(key)

    def end_token(self) -> None:
        self.tokens_ended += 1
        self.read.clear()
        self.running = self.tokens_handed_over > self.tokens_ended

    def begin_token(self) -> None:
        self.tokens_handed_over += 1
        self.running = True

    def _go_on(self) -> None:
        """Between two looks of the host a token ends, another reads entries, and copies are carried out."""
        if self.between is None:
            return
        keys, self.between = self.between, None
        while self.running:
            self.end_token()
        self.begin_token()
        for key in keys:
            self.read_entry(key)
        while self.queue:
            self.step_copies()

    def _queue(self, kind: str, key: int, slot: int) -> int:
        self.queue.append((kind, key, slot))
        self.queued += 1
        return self.queued


class SlotLife(RuleBasedStateMachine):
    """The ledger drives the device; hypothesis decides what happens next, and how late the host learns of it."""

    @initialize(
        slots=st.integers(4, 6),
        spare=st.integers(1, 2),
        partitions=st.sampled_from([1, L]),
        recency=st.booleans(),
        start=st.lists(st.integers(0, KEYS - 1), unique=True, max_size=6),
    )
    def build(self, slots: int, spare: int, partitions: int, recency: bool, start: list[int]) -> None:
        self.device = Device(slots)
        self.rule = LeastRecentlyUsed(KEYS) if recency else LeastFrequentlyUsed(KEYS)
        self.ledger = SlotLedger(KEYS, slots, spare, self.rule, self.device, self.device, partitions)
        held = {key: slot for slot, key in enumerate(start[:slots])}
        for key, slot in held.items():
            self.device.contents[slot] = key
        for key, slot in self.ledger.take_over(held).items():
            self.device.table[key] = slot

    @rule(key=st.integers(0, KEYS - 1), speculative=st.booleans())
    def admit(self, key: int, speculative: bool) -> None:
        reservation = self.ledger.admit(key, float(self.rule.values(np.array([key]))[0]) + 1, speculative)
        if reservation is not None:
            assert self.ledger.is_filling(key)
            assert reservation.evicted != key

    @rule(between=st.none() | st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4))
    def poll(self, between: list[int] | None) -> None:
        self.device.between = between
        for key in self.ledger.poll():
            assert self.device.table[key] == self.ledger.holder(key)

    @rule(keys=st.lists(st.integers(0, J - 1), unique=True, max_size=2), layer=st.integers(0, L - 1))
    def use(self, keys: list[int], layer: int) -> None:
        self.ledger.record_use([layer * J + key for key in keys])

    @precondition(lambda self: self.device.queue)
    @rule()
    def step_copies(self) -> None:
        self.device.step_copies()

    @precondition(lambda self: self.device.tokens_handed_over - self.device.tokens_ended < AHEAD)
    @rule()
    def hand_over(self) -> None:
        self.device.begin_token()

    @precondition(lambda self: self.device.running)
    @rule(keys=st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4))
    def read_entries(self, keys: list[int]) -> None:
        for key in keys:
            self.device.read_entry(key)

    @precondition(lambda self: self.device.running)
    @rule()
    def end_token(self) -> None:
        self.device.end_token()

    @rule()
    def learn_of_the_end(self) -> None:
        self.device.tokens_told = self.device.tokens_ended

    @invariant()
    def what_is_read_stays(self) -> None:
        if hasattr(self, "device"):
            for slot, keys in self.device.read.items():
                assert {self.device.contents[slot]} == keys

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "device"):
            return
        states = [self.ledger.state(slot) for slot in range(self.ledger.slots)]
        held = states.count(SlotState.FILLING) + states.count(SlotState.SWITCHED)
        assert held <= self.ledger.capacity < self.ledger.slots
        for key, slot in self.ledger.residents().items():
            assert self.device.table[key] == slot
            assert self.device.contents[slot] == key
        for slot, state in enumerate(states):
            if state == SlotState.FREE:
                assert slot not in self.device.table

    def teardown(self) -> None:
        """Once the device is idle every slot is free or switched, and none is lost."""
        if not hasattr(self, "device"):
            return
        while self.device.queue:
            self.device.step_copies()
        self.device.tokens_told = self.device.tokens_ended = self.device.tokens_handed_over
        self.device.between = None
        self.ledger.poll()
        states = {self.ledger.state(slot) for slot in range(self.ledger.slots)}
        assert states <= {SlotState.FREE, SlotState.SWITCHED}
        assert self.ledger.copies_under_way == 0


TestSlotLife = SlotLife.TestCase
TestSlotLife.settings = settings(max_examples=120, stateful_step_count=60)


@pytest.fixture
def device() -> Device:
    return Device(3)


def make_ledger(device: Device) -> SlotLedger:
    return SlotLedger(KEYS, 3, 1, LeastRecentlyUsed(KEYS), device, device)


def finish_copies(device: Device, ledger: SlotLedger) -> list[int]:
    while device.queue:
        device.step_copies()
    return ledger.poll()


def test_a_slot_goes_round_its_four_states(device: Device) -> None:
    ledger = make_ledger(device)
    assert ledger.admit(0, 1.0, True) is not None
    slot = ledger.holder(0)
    assert ledger.state(slot) == SlotState.FILLING
    assert finish_copies(device, ledger) == [0]
    assert ledger.state(slot) == SlotState.SWITCHED
    ledger.admit(1, 2.0, True)
    finish_copies(device, ledger)
    device.tokens_handed_over = 2
    reservation = ledger.admit(2, 3.0, True)
    assert reservation is not None
    assert (reservation.evicted, reservation.evicted_unused) == (0, True)
    finish_copies(device, ledger)
    assert ledger.state(slot) == SlotState.RETIRED
    device.tokens_told = 1
    ledger.poll()
    assert ledger.state(slot) == SlotState.RETIRED
    device.tokens_told = 2
    ledger.poll()
    assert ledger.state(slot) == SlotState.FREE


def test_a_newcomer_worth_less_than_all_it_could_replace_is_refused(device: Device) -> None:
    ledger = SlotLedger(KEYS, 3, 1, LeastFrequentlyUsed(KEYS), device, device)
    for key in (0, 1):
        ledger.admit(key, 1.0, True)
    finish_copies(device, ledger)
    ledger.record_use([0, 1])
    assert ledger.admit(2, 0.5, True) is None
    assert ledger.admit(2, 1.0, True) is not None


def test_a_newcomer_waits_for_a_free_slot(device: Device) -> None:
    ledger = make_ledger(device)
    for key in (0, 1):
        ledger.admit(key, 1.0, False)
    finish_copies(device, ledger)
    device.tokens_handed_over = 1
    assert ledger.admit(2, 9.0, False) is not None
    finish_copies(device, ledger)
    assert ledger.admit(3, 9.0, False) is None
    device.tokens_told = 1
    ledger.poll()
    assert ledger.admit(3, 9.0, False) is not None


def test_taking_over_more_than_it_holds_drops_the_least_valued(device: Device) -> None:
    ledger = make_ledger(device)
    assert ledger.take_over({5: 0, 6: 1, 7: 2}) == {6: 1, 7: 2}
    assert ledger.state(0) == SlotState.FREE


def test_a_token_that_begins_between_the_hosts_two_looks_fences_the_slot(device: Device) -> None:
    ledger = make_ledger(device)
    for key in (0, 1):
        ledger.admit(key, 1.0, False)
    finish_copies(device, ledger)
    ledger.admit(2, 9.0, False)
    device.between = [0]
    ledger.poll()
    ledger.poll()
    assert ledger.admit(3, 9.0, False) is None
    device.end_token()
    device.tokens_told = device.tokens_ended
    ledger.poll()
    assert ledger.admit(3, 9.0, False) is not None

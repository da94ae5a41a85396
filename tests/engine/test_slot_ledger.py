"""The protocol of device slots against an adversary: any order of host steps, copies, layers and letters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.eviction import LeastFrequentlyUsed, LeastRecentlyUsed
from engine.slot_ledger import SlotLedger
from engine.slot_life import Displaced, Landings, SlotState
from tests.engine.table_model import HOME, TableModel

L, J = 2, 4
KEYS = L * J


class SlotLife(RuleBasedStateMachine):
    """The ledger drives the device; hypothesis decides what happens next, and how late each side learns of it."""

    @initialize(
        slots=st.integers(3, 7),
        spare=st.integers(0, 2),
        partitions=st.sampled_from([1, L]),
        ahead=st.integers(1, 4),
        recency=st.booleans(),
        start=st.lists(st.integers(0, KEYS - 1), unique=True, max_size=7),
    )
    def build(self, slots: int, spare: int, partitions: int, ahead: int, recency: bool, start: list[int]) -> None:
        spare = min(spare, slots - partitions)
        self.device = TableModel(slots, KEYS, partitions, batch=2)
        self.rule = LeastRecentlyUsed(KEYS) if recency else LeastFrequentlyUsed(KEYS)
        self.ledger = SlotLedger(KEYS, slots, spare, self.rule, self.device, self.device, partitions)
        held = {key: slot for slot, key in enumerate(start[:slots])}
        for key, slot in held.items():
            self.device.contents[slot] = key
        for key, slot in self.ledger.take_over(held, ahead).items():
            self.device.table[key] = slot
        self.holding = len(self.ledger.residents())

    @rule(key=st.integers(0, KEYS - 1), speculative=st.booleans())
    def admit(self, key: int, speculative: bool) -> None:
        reservation = self.ledger.admit(key, float(self.rule.values(np.array([key]))[0]) + 1, speculative)
        if reservation is not None:
            assert self.ledger.is_coming(key)
            assert reservation.evicted != key

    @rule()
    def poll(self) -> None:
        self.ledger.poll()

    @rule()
    def offer(self) -> None:
        self.ledger.offer()

    @rule(keys=st.lists(st.integers(0, J - 1), unique=True, max_size=2), layer=st.integers(0, L - 1))
    def use(self, keys: list[int], layer: int) -> None:
        self.ledger.record_use([layer * J + key for key in keys])

    @precondition(lambda self: self.device.letters)
    @rule()
    def read_letter(self) -> None:
        for displaced in self.ledger.book(*self.device.letters.popleft()):
            assert 0 <= displaced.key < KEYS

    @precondition(lambda self: self.device.copies)
    @rule()
    def finish_copy(self) -> None:
        self.device.finish_copy()

    @precondition(lambda self: self.device.running is None)
    @rule(
        layer=st.integers(0, L - 1),
        experts=st.lists(st.integers(0, J - 1), unique=True, min_size=1, max_size=3),
        visible=st.integers(0, 4),
    )
    def run_layer(self, layer: int, experts: list[int], visible: int) -> None:
        self.device.resolve([layer * J + expert for expert in experts], visible)

    @precondition(lambda self: self.device.running is not None)
    @rule(visible=st.integers(0, 4))
    def settle(self, visible: int) -> None:
        self.device.settle(visible)

    @invariant()
    def entries_point_to_their_experts(self) -> None:
        if hasattr(self, "device"):
            for key, slot in enumerate(self.device.table):
                assert slot == HOME or self.device.contents[slot] == key

    @invariant()
    def free_slots_are_nobodys(self) -> None:
        if not hasattr(self, "device"):
            return
        for slot in range(self.ledger.slots):
            if self.ledger.state(slot) in (SlotState.FREE, SlotState.FILLING):
                assert slot not in self.device.table

    def teardown(self) -> None:
        """Once the device is idle and all is booked, the books are the table, and no slot is lost."""
        if not hasattr(self, "device"):
            return
        while True:
            if self.device.running is not None:
                self.device.settle(visible=9)
            while self.device.copies:
                self.device.finish_copy()
            self.ledger.poll()
            while self.device.letters:
                self.ledger.book(*self.device.letters.popleft())
            if not self.device.orders and self.device.settled == (0, 0):
                break
            self.device.resolve([0], visible=0)
        states = [self.ledger.state(slot) for slot in range(self.ledger.slots)]
        assert set(states) <= {SlotState.FREE, SlotState.HELD, SlotState.OFFERED, SlotState.LANDING}
        held = {key: slot for key, slot in enumerate(self.device.table) if slot != HOME}
        assert self.ledger.residents() == held
        assert len(held) <= self.ledger.capacity


TestSlotLife = SlotLife.TestCase
TestSlotLife.settings = settings(max_examples=150, stateful_step_count=60)


@pytest.fixture
def device() -> TableModel:
    return TableModel(3, KEYS)


def make_ledger(device: TableModel, spare: int = 1) -> SlotLedger:
    return SlotLedger(KEYS, 3, spare, LeastRecentlyUsed(KEYS), device, device)


def run_layer(device: TableModel, ledger: SlotLedger, keys: list[int]) -> list[Displaced]:
    """A layer from its gate to its end, booked as soon as its letter is there."""
    device.resolve(keys, visible=9)
    displaced = ledger.book(*device.letters.popleft())
    device.settle(visible=9)
    return displaced


def bring_in(device: TableModel, ledger: SlotLedger, key: int, speculative: bool = False) -> None:
    assert ledger.admit(key, 9.0, speculative) is not None
    device.finish_copy()
    ledger.poll()
    for _ in range(2):
        run_layer(device, ledger, [7])


def test_a_copied_expert_goes_through_filling_and_pointing_and_leaves_by_an_order(device: TableModel) -> None:
    ledger = make_ledger(device)
    assert ledger.admit(0, 1.0, True) is not None
    slot = ledger.holder(0)
    assert ledger.state(slot) == SlotState.FILLING
    ledger.poll()
    assert ledger.state(slot) == SlotState.FILLING
    device.finish_copy()
    ledger.poll()
    assert ledger.state(slot) == SlotState.POINTING
    run_layer(device, ledger, [7])
    assert ledger.state(slot) == SlotState.POINTING
    run_layer(device, ledger, [7])
    assert ledger.state(slot) == SlotState.HELD
    bring_in(device, ledger, 1)
    reservation = ledger.admit(2, 3.0, True)
    assert reservation is not None
    assert (reservation.evicted, reservation.evicted_unused) == (0, True)
    assert ledger.state(slot) == SlotState.LEAVING
    assert ledger.admit(3, 9.0, False) is None
    for _ in range(2):
        run_layer(device, ledger, [7])
    assert ledger.state(slot) == SlotState.FREE
    assert ledger.admit(3, 9.0, False) is not None


def test_a_missing_expert_lands_in_an_empty_slot_and_then_where_another_leaves(device: TableModel) -> None:
    ledger = SlotLedger(KEYS, 2, 0, LeastRecentlyUsed(KEYS), device, device)
    for key in (0, 1):
        ledger.offer()
        assert run_layer(device, ledger, [key]) == []
        assert ledger.state(ledger.holder(key)) == SlotState.LANDING
    ledger.record_use([0, 1])
    run_layer(device, ledger, [1])
    ledger.offer()
    slot = ledger.holder(0)
    assert ledger.state(slot) == SlotState.OFFERED
    # Until something lands in its slot the victim is read there.
    assert device.resolve([0, 1], visible=9).read[0] == slot
    device.settle(visible=9)
    assert ledger.book(*device.letters.popleft()) == []
    assert run_layer(device, ledger, [2]) == [Displaced(0, unused=False)]
    assert (ledger.holder(0), ledger.holder(2)) == (-1, slot)


def test_a_victim_that_the_same_layer_reads_stays(device: TableModel) -> None:
    ledger = SlotLedger(KEYS, 1, 0, LeastRecentlyUsed(KEYS), device, device)
    device.contents[0], device.table[0] = 0, 0
    ledger.take_over({0: 0}, 1)
    ledger.offer()
    assert run_layer(device, ledger, [0, 1]) == []
    assert ledger.state(0) == SlotState.HELD
    assert ledger.holder(1) == -1


def test_a_copy_that_an_expert_has_overtaken_by_landing_is_void_and_counts_as_waste(device: TableModel) -> None:
    ledger = make_ledger(device)
    ledger.offer()
    assert ledger.admit(0, 9.0, True) is not None
    copied_to = ledger.holder(0)
    run_layer(device, ledger, [0])
    landed_in = ledger.holder(0)
    assert landed_in != copied_to
    device.finish_copy()
    ledger.poll()
    run_layer(device, ledger, [7])
    assert run_layer(device, ledger, [0]) == [Displaced(0, unused=True)]
    assert ledger.state(copied_to) == SlotState.FREE
    assert (ledger.holder(0), device.table[0]) == (landed_in, landed_in)


def test_a_newcomer_worth_less_than_all_it_could_replace_is_refused(device: TableModel) -> None:
    ledger = SlotLedger(KEYS, 3, 1, LeastFrequentlyUsed(KEYS), device, device)
    for key in (0, 1):
        bring_in(device, ledger, key)
    ledger.record_use([0, 1])
    assert ledger.admit(2, 0.5, True) is None
    assert ledger.admit(2, 1.0, True) is not None


def test_taking_over_more_than_it_holds_drops_the_least_valued(device: TableModel) -> None:
    ledger = make_ledger(device)
    assert ledger.take_over({5: 0, 6: 1, 7: 2}, 1) == {6: 1, 7: 2}
    assert ledger.state(0) == SlotState.FREE


def test_spare_slots_are_never_offered(device: TableModel) -> None:
    ledger = make_ledger(device)
    for key in range(KEYS):
        ledger.offer()
        run_layer(device, ledger, [key])
    assert len(ledger.residents()) == ledger.capacity == 2
    assert ledger.has_free


def test_letters_of_nothing_change_nothing(device: TableModel) -> None:
    ledger = make_ledger(device)
    assert ledger.book(0, Landings({}, 0, 0, 0)) == []

"""The queue's order and what never gets lost in it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from engine.transfer_queue import Prefetch, TransferQueue

KEYS = 6


class QueueMachine(RuleBasedStateMachine):
    """A queue beside a list of decided loads and a dict of the best offer of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = TransferQueue()
        self.decided: list[int] = []
        self.started: set[int] = set()
        self.offers: dict[int, Prefetch] = {}
        self.now = 0

    @rule(keys=st.lists(st.integers(0, KEYS - 1), max_size=3, unique=True))
    def decide(self, keys: list[int]) -> None:
        fresh = [k for k in keys if k not in self.decided and k not in self.started]
        self.queue.decide(fresh)
        self.decided += fresh
        for key in fresh:
            self.offers.pop(key, None)

    @rule(key=st.integers(0, KEYS - 1), ahead=st.integers(1, 4), probability=st.floats(0, 1))
    def offer(self, key: int, ahead: int, probability: float) -> None:
        new = Prefetch(key, self.now + ahead, probability)
        self.queue.offer([new])
        old = self.offers.get(key)
        if old is None or old.due < new.due or old.probability < new.probability:
            self.offers[key] = new

    @rule()
    def start_decided(self) -> None:
        key = self.queue.next_decided()
        assert key == (self.decided[0] if self.decided else None)
        if key is not None:
            self.started.add(self.decided.pop(0))

    @rule(postponed=st.booleans())
    def end_decided(self, postponed: bool) -> None:
        if self.started:
            key = min(self.started)
            self.started.discard(key)
            if postponed:
                self.queue.postpone(key)
                self.decided.insert(0, key)
            else:
                self.queue.finish(key)

    @rule()
    def drop_decided(self) -> None:
        self.queue.drop_decided()
        self.decided.clear()
        self.started.clear()

    @rule(steps=st.integers(0, 3), resident=st.sets(st.integers(0, KEYS - 1)))
    def take_prefetch(self, steps: int, resident: set[int]) -> None:
        self.now += steps
        taken = self.queue.next_prefetch(self.now, lambda key: key not in resident)
        if self.decided or self.started:
            assert taken is None and self.queue.paused
            return
        self.offers = {k: p for k, p in self.offers.items() if p.due > self.now and k not in resident}
        if not self.offers:
            assert taken is None
            return
        assert taken is not None and self.offers.pop(taken.key) == taken
        priority = taken.probability / (taken.due - self.now)
        assert all(p.probability / (p.due - self.now) <= priority for p in self.offers.values())


QueueMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase


def test_priorities_are_ranked_anew_as_layers_pass() -> None:
    queue = TransferQueue()
    queue.offer([Prefetch(0, due=2, probability=0.3), Prefetch(1, due=5, probability=0.9)])
    near = queue.next_prefetch(1, lambda key: True)
    assert near is not None and near.key == 0  # 0.3 / 1 against 0.9 / 4
    queue.offer([Prefetch(0, due=4, probability=0.3)])
    far = queue.next_prefetch(1, lambda key: True)
    assert far is not None and far.key == 1  # 0.3 / 3 against 0.9 / 4


def test_a_prefetch_past_its_layer_is_dropped() -> None:
    queue = TransferQueue()
    queue.offer([Prefetch(0, due=3, probability=1.0)])
    assert queue.next_prefetch(3, lambda key: True) is None
    assert len(queue) == 0

"""The cache under every order of events hypothesis can think of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from engine.cache import ExpertCache, Residency
from engine.eviction import LeastRecentlyUsed, ProbabilityFrequency

KEYS, SLOTS = 9, 4


class CacheMachine(RuleBasedStateMachine):
    """A cache beside a plain model of it: sets of resident, loading and pinned experts."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.cache = ExpertCache(KEYS, SLOTS, ProbabilityFrequency(KEYS))
        self.resident: set[int] = set()
        self.loading: set[int] = set()
        self.pinned: dict[int, int] = {}

    @rule(key=st.integers(0, KEYS - 1), speculative=st.none() | st.floats(0, 3))
    def reserve(self, key: int, speculative: float | None) -> None:
        if key in self.resident | self.loading:
            with pytest.raises(RuntimeError):
                self.cache.reserve(key, speculative)
            return
        evictable = self.resident - {k for k, n in self.pinned.items() if n}
        values = {k: float(self.cache.rule.values(np.array([k]))[0]) for k in evictable}
        full = len(self.resident) + len(self.loading) == SLOTS
        reservation = self.cache.reserve(key, speculative)
        if not full:
            assert reservation is not None and reservation.evicted is None
        elif not evictable or (speculative is not None and min(values.values()) > speculative):
            assert reservation is None
            return
        else:
            assert reservation is not None and reservation.evicted in evictable
            assert values[reservation.evicted] == min(values.values())
            self.resident.discard(reservation.evicted)
        self.loading.add(key)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.loading)))
        self.cache.commit(key)
        self.loading.discard(key)
        self.resident.add(key)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.loading)))
        self.cache.release(key)
        self.loading.discard(key)
        self.pinned.pop(key, None)

    @precondition(lambda self: self.resident | self.loading)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.resident | self.loading)))
        self.cache.pin(key)
        self.pinned[key] = self.pinned.get(key, 0) + 1

    @rule(key=st.integers(0, KEYS - 1))
    def unpin(self, key: int) -> None:
        if self.pinned.get(key):
            self.cache.unpin(key)
            self.pinned[key] -= 1
        else:
            with pytest.raises(RuntimeError):
                self.cache.unpin(key)

    @rule(keys=st.lists(st.integers(0, KEYS - 1), max_size=KEYS, unique=True))
    def use(self, keys: list[int]) -> None:
        self.cache.record_use(keys)

    @rule(weights=st.lists(st.floats(0, 1), min_size=KEYS, max_size=KEYS))
    def guide(self, weights: list[float]) -> None:
        self.cache.rule.record_guidance(np.array(weights))

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert set(self.cache.resident_keys()) == self.resident
        assert set(self.cache.loading_keys()) == self.loading
        assert self.cache.occupied() == len(self.resident) + len(self.loading) <= SLOTS
        slots = [self.cache.slot(key) for key in self.resident | self.loading]
        assert len(set(slots)) == len(slots) and all(0 <= slot < SLOTS for slot in slots)
        for key in range(KEYS):
            expected = (
                Residency.RESIDENT
                if key in self.resident
                else Residency.LOADING
                if key in self.loading
                else Residency.ABSENT
            )
            assert self.cache.residency(key) is expected


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def load(cache: ExpertCache, key: int, speculative: float | None = None) -> None:
    assert cache.reserve(key, speculative) is not None
    cache.commit(key)


def test_equal_values_leave_by_least_recent_use() -> None:
    cache = ExpertCache(4, 2, ProbabilityFrequency(4))
    load(cache, 0)
    load(cache, 1)
    cache.record_use([0])
    reservation = cache.reserve(2)
    assert reservation is not None and reservation.evicted == 1


def test_a_prefetched_expert_evicted_before_its_use_is_reported_unused() -> None:
    cache = ExpertCache(4, 1, LeastRecentlyUsed(4))
    load(cache, 0, speculative=1.0)
    unused = cache.reserve(1)
    assert unused is not None and unused.evicted_unused
    cache.commit(1)
    cache.record_use([1])
    used = cache.reserve(2)
    assert used is not None and not used.evicted_unused

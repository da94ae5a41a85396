"""Eviction rules against their formulas."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.eviction import LeastRecentlyUsed, ProbabilityFrequency


@given(
    st.lists(st.floats(0.001, 1), min_size=5, max_size=5),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), max_size=30),
)
def test_probability_frequency_orders_as_the_papers_priority(weights: list[float], uses: list[list[int]]) -> None:
    rule = ProbabilityFrequency(5)
    frequency = np.ones(5)
    for layer in uses:
        rule.record_use(layer)
        frequency[layer] += 1
    probabilities = np.array(weights)
    rule.record_guidance(probabilities)
    priority = 1 / (probabilities * frequency)
    values = rule.values(np.arange(5))
    for i in range(5):
        for j in range(5):
            if priority[i] > priority[j] * (1 + 1e-9):
                assert values[i] < values[j]


def test_an_expert_without_probability_goes_first_without_dividing_by_zero() -> None:
    rule = ProbabilityFrequency(3)
    rule.record_use([0, 1])
    rule.record_use([0])
    rule.record_guidance(np.array([0.0, 0.5, 0.5]))
    assert rule.values(np.array([0, 1, 2])).tolist() == [0.0, 1.0, 0.5]


def test_a_speculative_load_is_valued_on_the_same_scale() -> None:
    rule = ProbabilityFrequency(2)
    rule.record_use([1])
    rule.record_guidance(np.array([0.4, 0.6]))
    assert rule.speculative_value(1, 0.6) == rule.values(np.array([1]))[0]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_lru_evicts_what_was_used_longest_ago(uses: list[int]) -> None:
    rule = LeastRecentlyUsed(7)
    for key in uses:
        rule.record_use([key])
    held = sorted(set(uses))
    oldest = min(held, key=lambda key: len(uses) - 1 - uses[::-1].index(key))
    assert held[int(np.argmin(rule.values(np.array(held))))] == oldest

"""Selection against brute force (paper section 4.3)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.hardware import Hardware
from engine.selection import prefetch_priority, select_deliverable, select_experts, select_many, selection_threshold
from engine.transfer_queue import Prefetch

distributions = st.lists(st.integers(0, 50), min_size=1, max_size=7).filter(any).map(lambda w: np.array(w) / sum(w))


@given(st.floats(-2, 2, allow_nan=False))
def test_threshold_is_one_minus_score_within_zero_and_one(score: float) -> None:
    assert selection_threshold(score) == max(0.0, min(1.0, 1.0 - score))


@given(distributions, st.floats(0, 1), st.integers(1, 7))
def test_no_smaller_set_reaches_the_threshold(probabilities: np.ndarray, threshold: float, minimum: int) -> None:
    chosen = select_experts(probabilities, threshold, minimum).tolist()
    reaching = [
        size
        for size in range(1, len(probabilities) + 1)
        if any(
            np.cumsum(sorted(probabilities[list(subset)], reverse=True))[-1] >= threshold
            for subset in itertools.combinations(range(len(probabilities)), size)
        )
    ]
    smallest = min(reaching, default=len(probabilities))
    assert len(chosen) == len(set(chosen)) == min(max(smallest, minimum), len(probabilities))
    left_out = set(range(len(probabilities))) - set(chosen)
    assert all(probabilities[i] >= probabilities[j] for i in chosen for j in left_out)


def test_a_sum_equal_to_the_threshold_is_enough() -> None:
    assert select_experts(np.array([0.25, 0.5, 0.25]), 0.75, 1).tolist() == [1, 0]
    assert select_experts(np.array([0.25, 0.5, 0.25]), 0.5, 1).tolist() == [1]


@pytest.mark.parametrize("minimum", [1, 2, 4])
def test_a_perfect_match_takes_only_the_minimum(minimum: int) -> None:
    assert len(select_experts(np.array([0.1, 0.2, 0.3, 0.4]), selection_threshold(1.0), minimum)) == minimum


@given(st.floats(0, 1), st.integers(1, 64))
def test_priority_falls_with_distance(probability: float, distance: int) -> None:
    assert prefetch_priority(probability, distance) == probability / distance


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 6), experts=st.integers(1, 9), minimum=st.integers(1, 4))
def test_many_layers_at_once_select_what_each_would(seed: int, rows: int, experts: int, minimum: int) -> None:
    rng = np.random.default_rng(seed)
    distributions = rng.dirichlet(np.ones(experts), size=rows).astype(np.float32).round(2)
    thresholds = rng.random(rows).round(1)
    each = [select_experts(d, t, minimum).tolist() for d, t in zip(distributions, thresholds.tolist(), strict=True)]
    assert select_many(distributions, thresholds, minimum) == each


def test_what_cannot_arrive_in_part_is_not_sent() -> None:
    """A link that moves half an expert a layer: by expected stall saved a byte, as long as some of it arrives."""
    hardware = Hardware(expert_bytes=100, bandwidth=100.0, latency=0.0, layer_seconds=0.5, chunk_bytes=0)
    near, middle, far, later = (
        Prefetch(n, due, p) for n, (due, p) in enumerate([(1, 0.9), (2, 0.5), (4, 0.4), (5, 0.3)])
    )
    # The first three save 0.45, 0.5 and 0.4 of a copy; the middle one goes first, and keeps the near one from arriving.
    assert select_deliverable([near, middle, far, later], 0, hardware) == [middle, far, later]
    assert select_deliverable([near], 0, hardware) == [near]
    assert select_deliverable([], 0, hardware) == []

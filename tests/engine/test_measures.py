from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.measures import Distribution, measure_requests
from engine.steps import Step, Traffic


def step(phase: str, seconds: float, hits: int = 0, stall: float = 0.0) -> Step:
    traffic = Traffic(hits=hits, misses=1, bytes_on_demand=10, stall_seconds=stall)
    return Step(int(phase == "decode"), phase, (1,), ("",), (None,), seconds, traffic)


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=50))
def test_distribution_agrees_with_the_standard_library(samples: list[float]) -> None:
    found = Distribution.of(samples)
    assert found is not None
    assert found.mean == pytest.approx(statistics.fmean(samples))
    assert found.deviation == pytest.approx(statistics.stdev(samples), abs=1e-6)
    assert found.p50 == pytest.approx(statistics.median(samples))
    assert min(samples) - 1e-9 <= found.p50 <= found.p90 <= found.p99 <= max(samples) + 1e-9


def test_a_single_sample_has_no_deviation_and_none_is_no_distribution() -> None:
    assert Distribution.of([2.0]) == Distribution(2.0, 0.0, 2.0, 2.0, 2.0)
    assert Distribution.of([]) is None


def test_requests_are_measured_by_phase() -> None:
    quick = [step("prefill", 0.5), step("decode", 0.1, hits=3, stall=0.05), step("decode", 0.1)]
    slow = [step("prefill", 1.5), step("decode", 0.4), step("decode", 0.2)]
    measures = measure_requests([quick, slow])
    assert measures.requests == 2
    assert measures.ttft is not None and measures.ttft.mean == 1.0
    assert measures.tpot is not None and measures.tpot.mean == pytest.approx(0.2)
    assert measures.tpot.p99 == pytest.approx(0.4, rel=0.05)
    assert measures.tokens_per_second is not None
    # 4 tokens in 0.8 s, though the mean of the two rates is higher.
    assert measures.tokens_per_second.mean == pytest.approx(5.0)
    assert measures.tokens_per_second.p50 == pytest.approx((10 + 2 / 0.6) / 2)
    assert (measures.prefill.misses, measures.decode.hits, measures.decode.bytes_on_demand) == (2, 3, 40)
    assert measures.decode_stall is not None and measures.decode_stall.mean == pytest.approx(0.0125)


def test_without_decode_steps_the_rate_is_the_prefills() -> None:
    measures = measure_requests([[step("prefill", 0.5)]])
    assert measures.tpot is None and measures.decode_stall is None
    assert measures.tokens_per_second is not None and measures.tokens_per_second.mean == 2.0

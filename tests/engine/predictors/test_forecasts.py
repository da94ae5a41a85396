"""Forecasts: the same a request or a gate at a time, blind to the future, and calibrated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.predictors import request_state
from engine.predictors.fitted import DISCOUNTS, FittedPredictors, Forecast
from engine.predictors.fitting import fit_predictors
from engine.predictors.live import LiveForecast
from engine.predictors.sampling import discounted_next_use
from engine.predictors.similar import nearest
from engine.traces import RoutingTrace, TracedRequest
from tests.engine.sample_traces import gated_trace, sample_manifest, sample_trace

EXPERTS = 8


@pytest.fixture(scope="module", params=["gate inputs", "embeddings", "routing alone"])
def sides(request: pytest.FixtureRequest) -> tuple[FittedPredictors, RoutingTrace]:
    if request.param == "gate inputs":
        return fit_predictors(gated_trace(10, 40, seed=1), depth=2), gated_trace(2, 40, seed=2)
    manifest = sample_manifest(hidden_size=5 if request.param == "embeddings" else None)
    return fit_predictors(sample_trace(10, 40, manifest, seed=1), depth=2), sample_trace(2, 40, manifest, seed=2)


def go_through(fitted: FittedPredictors, request: TracedRequest, discount: float) -> Forecast:
    """What a live forecast says, in the form of a prepared one."""
    live = LiveForecast(fitted, discount)
    maps, uses = request.maps(EXPERTS), request.uses(EXPERTS)
    iterations, layers, _ = maps.shape
    current = np.zeros((iterations, layers, fitted.knowledge.depth, EXPERTS), dtype=np.float32)
    upcoming, values, start = [live.upcoming], [live.values], []
    left = np.empty_like(maps)
    for t in range(iterations):
        embedding = None if request.embeddings is None else request.embeddings[t]
        start.append(live.begin(request.phases[t], embedding))
        for layer in range(layers):
            inputs = None
            if request.gate_inputs is not None and request.phases[t] == "decode":
                inputs = request.gate_inputs[t, layer]
            left[t, layer], ahead = live.observe(layer, maps[t, layer], uses[t, layer], inputs)
            current[t, layer, : len(ahead)] = ahead
        upcoming.append(live.upcoming)
        values.append(live.values)
    return Forecast(np.stack(upcoming), np.stack(start), current, np.stack(values), left)


def assert_alike(one: Forecast, other: Forecast, tolerance: float) -> None:
    for field in ("upcoming", "start", "current", "values", "left"):
        assert getattr(one, field) == pytest.approx(getattr(other, field), abs=tolerance), field


def test_a_gate_at_a_time_says_what_a_request_at_once_says(sides: tuple[FittedPredictors, RoutingTrace]) -> None:
    fitted, test = sides
    for request in test.requests:
        assert_alike(go_through(fitted, request, DISCOUNTS[1]), fitted.forecast(request, DISCOUNTS[1]), 1e-5)


def test_memory_of_a_long_request_is_bounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.predictors.request_state.WINDOW", 10)
    monkeypatch.setattr("engine.predictors.similar.WINDOW", 10)
    monkeypatch.setattr("engine.predictors.request_state.BLOCK", 7)
    monkeypatch.setattr("engine.predictors.fitted.BLOCK", 7)
    fitted = fit_predictors(gated_trace(6, 30, seed=1), depth=2)
    (request,) = gated_trace(1, 30, seed=2).requests
    assert len(request_state.RequestState(fitted.knowledge.popularity).maps) == 17
    assert_alike(go_through(fitted, request, DISCOUNTS[1]), fitted.forecast(request, DISCOUNTS[1]), 1e-5)


def test_prefills_are_told_apart(sides: tuple[FittedPredictors, RoutingTrace]) -> None:
    fitted, test = sides
    request = replace(test.requests[0], phases=("prefill",) * 2 + ("decode",) * 38)
    assert_alike(go_through(fitted, request, DISCOUNTS[1]), fitted.forecast(request, DISCOUNTS[1]), 1e-5)


def test_forecasts_do_not_read_the_future(sides: tuple[FittedPredictors, RoutingTrace]) -> None:
    """Whatever happens from iteration 15 on, what was said before stays the same."""
    fitted, test = sides
    request = test.requests[0]
    order = [*range(15), *(15 + np.random.default_rng(0).permutation(25))]
    shuffled = request.take(order)
    one, two = fitted.forecast(request, DISCOUNTS[1]), fitted.forecast(shuffled, DISCOUNTS[1])
    for field, known in (("upcoming", 16), ("values", 16), ("start", 15), ("current", 15), ("left", 15)):
        assert getattr(one, field)[:known] == pytest.approx(getattr(two, field)[:known], abs=1e-6), field


def test_forecasts_are_calibrated_on_requests_they_have_not_seen(sides: tuple[FittedPredictors, RoutingTrace]) -> None:
    fitted, _ = sides
    if fitted.reads_gate_inputs:
        test = gated_trace(8, 40, seed=3)
    else:
        width = None if fitted.knowledge.embedding_map is None else 5
        test = sample_trace(8, 40, sample_manifest(hidden_size=width), seed=3)
    said, seen = [], []
    for request in test.requests:
        forecast = fitted.forecast(request, DISCOUNTS[1])
        uses = request.uses(EXPERTS)
        said += [forecast.start.reshape(-1), forecast.current[:, :-1, 0].reshape(-1)]
        seen += [uses.reshape(-1), uses[:, 1:].reshape(-1)]
    assert _calibration_error(np.concatenate(said), np.concatenate(seen)) < 0.05


def _calibration_error(said: np.ndarray, seen: np.ndarray) -> float:
    bins = np.minimum((said * 10).astype(int), 9)
    gaps = [abs(said[bins == b].mean() - seen[bins == b].mean()) * (bins == b).mean() for b in set(bins.tolist())]
    return float(sum(gaps))


def test_a_value_is_the_discount_to_the_iterations_until_the_next_use() -> None:
    uses = np.array([[0, 1], [0, 0], [1, 0]], dtype=np.float32)
    values = discounted_next_use(uses, np.array([0.0, 0.5]), 0.5)
    assert values.tolist() == [[0.25, 1.0], [0.5, 0.125], [1.0, 0.25], [0.0, 0.5]]


@pytest.mark.parametrize("columns", [20, 1000, 1024])
def test_the_nearest_are_those_of_the_largest_cosines(columns: int) -> None:
    cosines = np.random.default_rng(0).random((5, columns), dtype=np.float32)
    found = np.sort(np.take_along_axis(cosines, nearest(cosines, 16), axis=1), axis=1)
    assert np.array_equal(found, np.sort(cosines, axis=1)[:, -16:])

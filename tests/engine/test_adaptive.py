"""The forecasts behind ``adaptive``: fitted weights, calibration, and what an expert is worth."""

from __future__ import annotations

import numpy as np
import pytest

from engine.adaptive import ExpectedUse, worth
from engine.hardware import Hardware
from engine.logistic import fit_logistic, sigmoid
from engine.map_search import MapArchive
from engine.policy_names import PolicyFactory
from engine.replay import Replay
from engine.traces import RoutingTrace
from engine.use_forecast import UseForecaster
from tests.engine.sample_traces import decode_request, sample_manifest, sample_trace


def test_logistic_finds_the_weights_it_was_drawn_from() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20_000, 2))
    happened = rng.random(20_000) < sigmoid(features @ np.array([1.5, -0.5]) + 0.3)
    assert fit_logistic(features, happened) == pytest.approx([1.5, -0.5, 0.3], abs=0.06)


def test_worth_is_the_sum_of_discounted_uses() -> None:
    """Used for certain at every visit, an expert waits for nothing; never used, it is worth nothing."""
    assert worth(np.array(0.0), np.array(0.0)) == 0
    assert worth(np.array(1.0), np.array(0.2)) == 1
    # Unlikely now, certain from the next token on: one discount.
    assert worth(np.array(0.0), np.array(1.0)) == pytest.approx(0.6)


def test_nearer_visits_are_worth_more() -> None:
    rule = ExpectedUse(sample_manifest(layers=3, experts=1, top_k=1))
    rule.worth[:] = 1.0
    rule.now = 0
    # After gate 0 come layers 1, 2, and then 0 of the next token.
    assert rule.values(np.arange(3)).tolist() == pytest.approx([0.6, 0.6 ** (1 / 3), 0.6 ** (2 / 3)])


def test_forecasts_are_calibrated_on_requests_they_have_not_seen() -> None:
    store, test = sample_trace(16, 60, seed=1), sample_trace(8, 60, seed=2)
    forecaster = UseForecaster(store, MapArchive(store, 400))
    said, seen = [], []
    for request in test.requests:
        forecast = forecaster.forecast(request)
        said.append(forecast.upcoming[:-1].reshape(-1))
        seen.append(request.uses(8).reshape(-1))
        said.append(forecast.current[:, :-1, 0].reshape(-1))
        seen.append(request.uses(8)[:, 1:].reshape(-1))
    assert _calibration_error(np.concatenate(said), np.concatenate(seen)) < 0.05


def _calibration_error(said: np.ndarray, seen: np.ndarray) -> float:
    """Expected calibration error over ten bins of equal width."""
    bins = np.minimum((said * 10).astype(int), 9)
    gaps = [abs(said[bins == b].mean() - seen[bins == b].mean()) * (bins == b).mean() for b in set(bins.tolist())]
    return float(sum(gaps))


def test_adaptive_beats_recency_where_one_kind_of_token_follows_another() -> None:
    """Six kinds of tokens take turns: recency always evicts what is used next, the store knows what follows."""
    manifest = sample_manifest()
    kinds = np.random.default_rng(0).random((6, 4, 8)).argsort(axis=2)[..., :2]
    requests = tuple(decode_request(n, kinds[(n + np.arange(60)) % 6]) for n in range(20))
    store, test = RoutingTrace(manifest, requests[:14]), RoutingTrace(manifest, requests[14:])
    hardware = Hardware(expert_bytes=100, bandwidth=1000.0, latency=0.0, layer_seconds=0.05, chunk_bytes=0)
    factory = PolicyFactory(store, test, 3, 400, hardware)
    tpot = {n: Replay(test, factory.build(n), hardware, 16, False).run(0).tpot_seconds for n in ("lru", "adaptive")}
    assert tpot["adaptive"] < 0.8 * tpot["lru"]

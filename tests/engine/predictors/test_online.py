"""Learning on line: towards what requests turn out to use, alike in both forms, and never from the future."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.predictors.calibration import measure_reliability
from engine.predictors.fitted import DISCOUNTS, FittedPredictors
from engine.predictors.fitting import fit_predictors
from engine.predictors.mix import Mix
from engine.predictors.online import OnlinePredictors, RequestOrder
from tests.engine.sample_traces import gated_trace

GAMMA = DISCOUNTS[1]


@pytest.fixture(scope="module")
def mistaken() -> FittedPredictors:
    """Predictors whose mixes are all too sure of themselves."""
    fitted = fit_predictors(gated_trace(10, 40, seed=1), depth=2)
    wrong = {m: Mix(mix.names, mix.weights + 2 * np.eye(len(mix.weights))[-1]) for m, mix in fitted.mixes.items()}
    return replace(fitted, mixes={m: Mix(mix.names, mix.weights.astype(np.float32)) for m, mix in wrong.items()})


def test_mistaken_mixes_are_mended(mistaken: FittedPredictors) -> None:
    requests = gated_trace(40, 40, seed=2).requests
    online = OnlinePredictors(mistaken)
    errors = {"fixed": [], "online": []}
    for request in requests:
        happened = request.uses(8)[:, 1:].reshape(-1)
        for name, forecast in (
            ("fixed", mistaken.forecast(request, GAMMA)),
            ("online", online.forecast(request, GAMMA)),
        ):
            errors[name].append(measure_reliability(forecast.current[:, :-1, 0].reshape(-1), happened).error)
    # The first request is over before anything can be learnt of it.
    assert errors["online"][0] == errors["fixed"][0]
    assert np.mean(errors["online"][-10:]) < 0.7 * np.mean(errors["fixed"][-10:])


def test_a_gate_at_a_time_learns_what_requests_at_once_learn(mistaken: FittedPredictors) -> None:
    whole, live = OnlinePredictors(mistaken), OnlinePredictors(mistaken)
    for request in gated_trace(8, 40, seed=2).requests:
        said = whole.forecast(request, GAMMA).current
        follow = live.follow(GAMMA)
        maps, uses = request.maps(8), request.uses(8)
        for t in range(len(request)):
            follow.begin("decode", request.embeddings[t])
            for layer in range(4):
                _, ahead = follow.observe(layer, maps[t, layer], uses[t, layer], request.gate_inputs[t, layer])
                assert ahead == pytest.approx(said[t, layer, : len(ahead)], abs=1e-5)


def test_replays_that_share_forecasts_learn_from_their_own_past_alone(mistaken: FittedPredictors) -> None:
    """Whatever other replays have gone through, the same requests are forecast alike."""
    requests = gated_trace(6, 40, seed=2).requests
    alone = OnlinePredictors(mistaken)
    expected = [alone.forecast(request, GAMMA) for request in requests]
    order = RequestOrder(mistaken)
    longer = order.reader()
    for request in (*requests[:4], *requests[:2]):
        longer(request, GAMMA)
    again = order.reader()
    for request, forecast in zip(requests, expected, strict=True):
        assert again(request, GAMMA).current == pytest.approx(forecast.current)

"""Mixes: calibrated on cases they have not seen, and better than each of their parts."""

from __future__ import annotations

import numpy as np
import pytest

from engine.logistic import fit_logistic, sigmoid
from engine.predictors.fitting import AHEAD, GATES, fit_predictors
from engine.predictors.mix import Mix, fit_mix, log_loss
from engine.predictors.row_sample import RowSample
from engine.predictors.sampling import RequestSampler
from tests.engine.sample_traces import gated_trace


def test_logistic_finds_the_weights_it_was_drawn_from() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20_000, 2))
    happened = rng.random(20_000) < sigmoid(features @ np.array([1.5, -0.5]) + 0.3)
    assert fit_logistic(features, happened) == pytest.approx([1.5, -0.5, 0.3], abs=0.06)


def test_a_mix_weighs_features_by_name() -> None:
    mix = Mix(("b", "a"), np.array([1.0, 0.0, 0.5], dtype=np.float32))
    assert mix({"a": np.array([9.0]), "b": np.array([-0.5])}) == pytest.approx([0.5])


def test_the_mix_beats_each_of_its_parts_on_requests_it_has_not_seen() -> None:
    fitted = fit_predictors(gated_trace(12, 40, seed=1), depth=2, maps=300)
    fit, judge = RowSample(), RowSample(1)
    for sample, seed in ((fit, 2), (judge, 3)):
        for request in gated_trace(4, 40, seed).requests:
            RequestSampler(fitted, sample, known_requests=False).add_ahead(request)
    loss = {
        names: log_loss(fit.fit("ahead-2", names)(judge.rows("ahead-2")), judge.outcome("ahead-2"))
        for names in ((*AHEAD, *GATES), *((name,) for name in (*AHEAD, *GATES)))
    }
    assert min(loss, key=lambda names: loss[names]) == (*AHEAD, *GATES)


def test_fractions_stand_for_shares_of_cases() -> None:
    rows = {"x": np.zeros(4)}
    assert fit_mix(["x"], rows, np.array([0.0, 0.5, 0.5, 0.5]))(rows) == pytest.approx([0.375] * 4, abs=1e-3)

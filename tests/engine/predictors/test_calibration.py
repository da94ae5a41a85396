"""Calibration: the error by hand, and that of predictors and mixes on requests they have not seen."""

from __future__ import annotations

import numpy as np
import pytest

from engine.predictors.calibration import MIX, judge_predictors, measure_reliability
from engine.predictors.fitting import fit_predictors
from tests.engine.sample_traces import gated_trace


def test_the_error_is_the_mean_gap_over_cases() -> None:
    said, happened = np.array([0.1, 0.1, 0.1, 0.9]), np.array([0, 0, 1, 1])
    reliability = measure_reliability(said, happened, bins=2)
    assert reliability.said.tolist() == pytest.approx([0.1, 0.9])
    assert reliability.seen.tolist() == pytest.approx([1 / 3, 1.0])
    assert reliability.counts.tolist() == [3, 1]
    assert reliability.error == pytest.approx((3 * (1 / 3 - 0.1) + 0.1) / 4)
    assert reliability.log_loss == pytest.approx(-(2 * np.log(0.9) + np.log(0.1) + np.log(0.9)) / 4)


def test_certainty_that_is_right_costs_nothing() -> None:
    reliability = measure_reliability(np.array([0.0, 1.0, 1.0]), np.array([0, 1, 1]))
    assert reliability.error == 0
    assert reliability.log_loss == pytest.approx(0, abs=1e-5)


def test_all_are_calibrated_and_the_mix_knows_most() -> None:
    fitted = fit_predictors(gated_trace(12, 40, seed=1), depth=2)
    judgements = judge_predictors(fitted, gated_trace(8, 40, seed=2).requests, gated_trace(8, 40, seed=3).requests)
    for moment in ("next", "start", "ahead-1", "ahead-2"):
        at = {one.predictor: one.reliability for one in judgements if one.moment == moment}
        assert len(at) > 3
        assert at[MIX].error < 0.05
        assert at[MIX].log_loss < 1.02 * min(reliability.log_loss for reliability in at.values())

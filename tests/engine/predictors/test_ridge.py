"""Ridge maps: a planted linear map is found, by either of the two ways to the solution."""

from __future__ import annotations

import numpy as np
import pytest

from engine.predictors.ridge import apply_ridge, choose_strength, fit_ridge


@pytest.mark.parametrize(("rows", "inputs"), [(400, 10), (40, 60)], ids=["more rows", "more inputs"])
def test_a_planted_map_is_recovered(rows: int, inputs: int) -> None:
    rng = np.random.default_rng(0)
    # Inputs of ten dimensions, so that few rows suffice.
    basis = rng.normal(size=(10, inputs))
    slopes, constant = rng.normal(size=(inputs, 3)), np.array([1.0, -2.0, 0.5])
    known, unseen = rng.normal(size=(rows, 10)) @ basis, rng.normal(size=(20, 10)) @ basis
    fitted = fit_ridge(known, known @ slopes + constant, 1e-6)
    assert apply_ridge(fitted, unseen) == pytest.approx(unseen @ slopes + constant, abs=0.05)


def test_noisy_targets_ask_for_a_stronger_ridge() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 30)).astype(np.float32)
    plain = inputs @ rng.normal(size=(30, 2))
    noise = 20 * rng.normal(size=plain.shape)
    assert choose_strength(inputs, plain) < choose_strength(inputs, plain + noise)

"""Fitted predictors survive their bytes."""

from __future__ import annotations

import io

import numpy as np
import pytest

from engine.errors import PolicyError
from engine.predictors.fitting import fit_predictors
from engine.predictors.packing import pack_predictors, unpack_predictors
from engine.traces import RoutingTrace
from tests.engine.sample_traces import gated_trace, sample_trace


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (gated_trace(6, 20, seed=1), gated_trace(1, 20, seed=2)),
        (sample_trace(6, 20, seed=1), sample_trace(1, 20, seed=2)),
    ],
    ids=["gate inputs", "routing alone"],
)
def test_unpacked_predictors_say_the_same(store: RoutingTrace, test: RoutingTrace) -> None:
    fitted = fit_predictors(store, depth=2)
    restored = unpack_predictors(pack_predictors(fitted))
    assert restored.reads_gate_inputs == fitted.reads_gate_inputs
    one, other = (f.forecast(test.requests[0], 0.5) for f in (fitted, restored))
    for field in ("upcoming", "start", "current", "values", "left"):
        assert getattr(one, field) == pytest.approx(getattr(other, field), abs=2e-3), field


@pytest.mark.parametrize("data", [b"", b"no archive", pack_predictors(fit_predictors(sample_trace(3, 8)))[:-300]])
def test_bytes_that_are_no_predictors_are_refused(data: bytes) -> None:
    with pytest.raises(PolicyError, match="fit them again"):
        unpack_predictors(data)


def test_another_version_is_refused() -> None:
    stream = io.BytesIO()
    np.savez(stream, about=np.frombuffer(b'{"version": 99}', dtype=np.uint8))
    with pytest.raises(PolicyError, match="version 99"):
        unpack_predictors(stream.getvalue())

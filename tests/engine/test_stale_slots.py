"""A short run of the benchmark that looks for tokens from slots that are nobody's."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.benchmarks.stale_slots import PoisoningKeeper, UnhurriedCopies, build_model, compare, quick_experts


@pytest.mark.skipif(torch.cuda.is_available(), reason="a test of its own runs the kernels, see test_gpu.py")
def test_no_token_comes_from_a_slot_that_is_poisoned(tmp_path: Path) -> None:
    with warnings.catch_warnings(), quick_experts("python"):
        warnings.simplefilter("error", RuntimeWarning)
        landed, copied = PoisoningKeeper.landed, UnhurriedCopies.filled
        *_, found = compare(build_model(tmp_path), 240, 60, "cpu", "mixtral-offloading")
    assert found.clean
    assert found.largest_difference < 1e-5
    assert found.poisoned > 0
    assert PoisoningKeeper.landed > landed
    assert UnhurriedCopies.filled > copied

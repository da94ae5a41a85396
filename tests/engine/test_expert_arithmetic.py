"""Families add up a token's experts in different precisions: found by running them, refused if none fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint import LoadedModel, load_model
from engine.errors import UnsupportedModelError
from engine.expert_arithmetic import Accumulation, find_accumulation
from engine.source import resolve_model
from tests.engine.tiny_models import build_tiny_model

CPU = torch.device("cpu")


def load(family: str, folder: Path, dtype: torch.dtype) -> LoadedModel:
    return load_model(resolve_model(str(build_tiny_model(family, folder))), CPU, dtype)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_moe", Accumulation.HIDDEN),
        ("deepseek_v3", Accumulation.HIDDEN),
        ("gpt_oss", Accumulation.HIDDEN),
        ("nemotron_h", Accumulation.WEIGHTS),
    ],
)
def test_each_familys_accumulation_is_recognised(family: str, expected: Accumulation, tmp_path: Path) -> None:
    loaded = load(family, tmp_path / family, torch.bfloat16)
    assert find_accumulation(loaded.layers[0], loaded.experts, torch.bfloat16, CPU) is expected


def test_a_family_that_computes_otherwise_is_refused(tmp_path: Path) -> None:
    loaded = load("qwen3_moe", tmp_path / "model", torch.bfloat16)
    experts = loaded.layers[0].experts

    class ScaledExperts(type(experts)):
        def forward(self, hidden_states, top_k_index, top_k_weights):  # replaced below, as the decorator does
            raise AssertionError

    eager = type(experts).forward.__wrapped__
    ScaledExperts.forward.__wrapped__ = lambda self, h, i, w: eager(self, h, i, w) * 1.5
    experts.__class__ = ScaledExperts
    with pytest.raises(UnsupportedModelError, match="ScaledExperts"):
        find_accumulation(loaded.layers[0], loaded.experts, torch.bfloat16, CPU)

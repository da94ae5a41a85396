"""Which families decode on the device, with eager's tokens, and which are left to the host, with which line.

Triton's interpreter checks each family's kernels before its first token; PyTorch then takes their place.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.source import resolve_model
from tests.engine.reference import engine_answer, load_reference, reference_answer
from tests.engine.tiny_models import TINY_FAMILIES, build_tiny_model

pytest.importorskip("triton")

from engine import device_decoder
from tests.engine.interpreter import mend_interpreter
from tests.engine.table_experts import EagerExperts, PlainKeeper, PlainMailbox

mend_interpreter()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[5, 9, 7, 3, 11, 13, 6], [4, 8, 12]]
NEW_TOKENS = 10

# The static cache sums attention in another order.
BOUND = 1e-5

_LINEAR = "its cache has a LinearAttentionLayer, which is not carried over"
REASONS = {
    **dict.fromkeys(["granitemoehybrid", "jamba", "lfm2_moe", "nemotron_h", "qwen3_next"], _LINEAR),
    "minimax": "its cache is a MiniMaxCache, which is not carried over",
}

# Families with layers that attend to a window only; 5 tokens are fewer than the prompt's, and fewer than are decoded.
WINDOWED: dict[str, dict[str, Any]] = {
    "exaone_moe": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4_text": {},
    "gpt_oss": {},
    "mixtral": {},
}
WINDOW = 5


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        stand_ins = {"ExpertProducts": EagerExperts, "Mailbox": PlainMailbox, "TableKeeper": PlainKeeper}
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(device_decoder, name, stand_in)


def check_tokens(family: str, folder: Path, **changes: Any) -> None:
    """The device's tokens are eager's, one prompt left-padded, at a budget that misses experts."""
    source = resolve_model(str(build_tiny_model(family, folder, **changes)))
    reference = load_reference(source.folder, torch.float32, DEVICE)
    budget = ExpertBudget.parse("40%")
    with Engine.open(source, cache=budget, device=DEVICE, dtype="float32", executor="device") as engine:
        expected = reference_answer(reference, PROMPTS, NEW_TOKENS, engine.tokenizer.pad_token_id)
        found = engine_answer(engine, PROMPTS, NEW_TOKENS)
        assert engine.traffic.misses > 0
    assert found.ids == expected.ids
    assert (found.logits - expected.logits).abs().max() < BOUND


@pytest.mark.parametrize("family", sorted(set(TINY_FAMILIES) - REASONS.keys()))
def test_families_of_the_device(family: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        check_tokens(family, tmp_path)


@pytest.mark.parametrize("family", [family for family in REASONS if family in TINY_FAMILIES])
def test_families_left_to_the_host(family: str, tmp_path: Path) -> None:
    line = f"the host decides in every layer of this model: {REASONS[family]}"
    with pytest.warns(RuntimeWarning, match=f"^{re.escape(line)}$"):
        check_tokens(family, tmp_path)


@pytest.mark.parametrize("family", [family for family in WINDOWED if family in TINY_FAMILIES])
def test_windows_shorter_than_the_prompt_and_the_reply(family: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        check_tokens(family, tmp_path, sliding_window=WINDOW, **WINDOWED[family])

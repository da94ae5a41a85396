from __future__ import annotations

import pytest
import torch

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.resident import ResidentModel
from engine.source import resolve_model
from engine.steps import GenerationSettings, Step
from tests.engine.reference import load_reference, reference_answer

PROMPT = list(range(40, 60))
SETTINGS = GenerationSettings(max_new_tokens=6, ignore_eos=True, keep_logits=True)


def tokens(steps: list[Step]) -> list[int | None]:
    return [step.token_ids[0] for step in steps]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_what_transformers_generates_and_what_the_engine_generates(dtype: str) -> None:
    source = resolve_model("demo")
    model = ResidentModel.open(source, device="cpu", dtype=dtype)
    assert model.default_implementation != "eager"
    model.use("eager")
    steps = list(model.generate([PROMPT], SETTINGS))
    expected = reference_answer(load_reference(source.folder, getattr(torch, dtype)), [PROMPT], 6, 0)
    assert tokens(steps) == expected.ids[0]
    assert torch.equal(torch.stack([step.logits for step in steps if step.logits is not None]), expected.logits)
    assert all(step.traffic.routed == 0 for step in steps)
    with Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu", dtype=dtype) as engine:
        assert tokens(list(engine.generate([PROMPT], SETTINGS))) == expected.ids[0]
        assert model.expert_bytes <= engine.total_expert_bytes

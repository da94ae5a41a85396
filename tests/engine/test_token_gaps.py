"""Where answers part from eager's, and how sure eager was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.benchmarking import answer_prompts
from engine.resident import ResidentModel
from engine.source import resolve_model
from engine.steps import GenerationSettings
from engine.token_gaps import Difference, GapMeter
from tests.engine.tiny_models import build_tiny_model


def test_gaps_are_those_of_the_logits_and_steps_are_as_before(tmp_path: Path) -> None:
    model = ResidentModel.open(resolve_model(str(build_tiny_model("qwen2_moe", tmp_path))), device="cpu")
    prompts = [[65, 66, 67], [72, 101]]
    meter = GapMeter(model)
    answered = answer_prompts(meter, prompts, 3, lambda: None)
    settings = GenerationSettings(max_new_tokens=3, ignore_eos=True, keep_logits=True)
    for prompt, steps, gaps in zip(prompts, answered, meter.gaps, strict=True):
        plain = list(model.generate([prompt], settings))
        assert [step.token_ids for step in steps] == [step.token_ids for step in plain]
        assert all(step.logits is None for step in steps)
        logits = [sorted(step.logits[0].tolist()) for step in plain if step.logits is not None]
        assert gaps == pytest.approx([row[-1] - row[-2] for row in logits])


def test_the_difference_with_the_widest_gap_is_told() -> None:
    expected = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    gaps = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]
    assert Difference.between(expected, expected, gaps) is None
    tokens = [[1, 0, 0], [4, 5, 0], [7, 8, 9]]
    assert Difference.between(tokens, expected, gaps) == Difference(prompts=2, prompt=1, token=2, gap=0.6)
    assert Difference.between(tokens, expected, None) == Difference(prompts=2, prompt=0, token=1, gap=None)

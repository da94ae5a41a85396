"""What transformers itself answers with its eager experts: the measure of every path in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.engine import Engine
from engine.families import expert_parameters, is_experts_module
from engine.steps import GenerationSettings

SHARED = Path(__file__).resolve().parents[3] / "shared"
MINIS = ("mini-mixtral-8x7b", "mini-qwen1.5-moe", "mini-phi3.5-moe")


@dataclass(frozen=True)
class Answer:
    """Greedy ids [B][N] and the logits float32 [N, B, V] they were chosen from."""

    ids: list[list[int]]
    logits: torch.Tensor


def load_reference(folder: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Transformers' eager model, its experts in memory of their own.

    Left as loaded, fused experts are views of the mapped file at whatever offset they have there, and a
    float32 product of the CPU's BLAS depends on that: eager then differs from itself in the last bit.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").to(device)
    for module in model.modules():
        if is_experts_module(module):
            for parameter in expert_parameters(module).values():
                parameter.data = parameter.data.clone()
    return model.eval()


def reference_answer(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, pad_id: int) -> Answer:
    """Greedy generation by transformers, left-padded, not stopping at end-of-turn tokens."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    settings = model.generation_config
    settings.eos_token_id = None
    output = model.generate(
        ids,
        attention_mask=mask,
        generation_config=settings,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=pad_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Answer(output.sequences[:, width:].tolist(), torch.stack(output.logits).float().cpu())


def engine_answer(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answer:
    """The same by the engine."""
    settings = GenerationSettings(max_new_tokens=new_tokens, ignore_eos=True, keep_logits=True)
    steps = list(engine.generate(prompts, settings))
    ids = [[step.token_ids[row] for step in steps] for row in range(len(prompts))]
    return Answer([[t for t in row if t is not None] for row in ids], torch.stack([s.logits for s in steps]))


def assert_identical(answer: Answer, expected: Answer) -> None:
    assert answer.logits.shape == expected.logits.shape
    assert (answer.logits - expected.logits).abs().max().item() == 0.0
    assert answer.ids == expected.ids

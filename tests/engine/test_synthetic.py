"""Full-size shapes without weights, and routing replayed from a trace; here in a tiny shape of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import synthetic
from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.errors import TraceError, UsageError
from engine.footprint import measure_model
from engine.steps import GenerationSettings
from engine.synthetic import SHAPES, ReplayedRouting, SyntheticShape, synthesize, synthetic_config
from tests.engine.sample_traces import sample_manifest, sample_trace

CPU = torch.device("cpu")
TINY = SyntheticShape(
    "qwen2_moe",
    {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 5000,
    },
    "moe_intermediate_size",
)


@pytest.mark.parametrize(
    ("name", "expert_bytes", "experts"),
    [
        ("mixtral-8x7b", 352_321_536, 256),
        ("qwen1.5-moe", 17_301_504, 1440),
        ("phi-3.5-moe", 157_286_400, 512),
        ("qwen3-30b-a3b", 9_437_184, 6144),
    ],
)
def test_shapes_have_the_bytes_of_the_real_models(name: str, expert_bytes: int, experts: int) -> None:
    size = measure_model(synthetic_config(name), torch.bfloat16, name)
    assert size.expert_bytes == expert_bytes
    assert size.experts_bytes == experts * expert_bytes


def test_an_unknown_shape_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no synthetic model .gpt.: give mixtral-8x7b, qwen1\.5-moe"):
        synthetic_config("gpt")


def test_a_synthetic_model_runs_with_a_traces_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    source, loaded = synthesize("tiny", CPU, torch.float32)
    trace = sample_trace(1, 4, sample_manifest(2, 6, 2))
    steps = trace.requests[0].probabilities
    assert steps is not None
    ReplayedRouting(loaded.layers, trace, CPU).attach()
    seen: list[list[int]] = []
    with Engine.open(source, cache=ExpertBudget.parse("100%"), device="cpu", dtype="float32", loaded=loaded) as engine:
        loaded.layers[1].experts.register_forward_pre_hook(lambda module, inputs: seen.extend(inputs[1].tolist()))
        tokens = list(engine.generate([[5, 6, 7]], GenerationSettings(max_new_tokens=4, ignore_eos=True)))
    assert len(tokens) == 4
    expected = [set(np.argsort(-steps[i % len(steps), 1].astype(np.float32))[:2].tolist()) for i in range(6)]
    assert [set(row) for row in seen] == expected


def test_a_trace_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", TINY)
    _, loaded = synthesize("tiny", CPU, torch.float32)
    with pytest.raises(TraceError, match="no gate distributions of 2 x 6 experts"):
        ReplayedRouting(loaded.layers, sample_trace(1, 4, sample_manifest(3, 6, 2)), CPU)

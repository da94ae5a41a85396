"""Prompts longer than a chunk: several passes over the model's own cache, each an iteration, all of them one step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.errors import UsageError
from engine.host_steps import PaddedBatch
from engine.source import ModelSource, resolve_model
from engine.steps import GenerationSettings
from engine.trace_files import TraceWriter, read_trace
from engine.traces import RoutingTrace, TraceManifest
from store.index import ResidentIndex
from tests.engine.live_replay import run_live, run_replay, set_scene
from tests.engine.reference import load_reference
from tests.engine.tiny_models import TINY_FAMILIES, build_tiny_model

PROMPTS = [[5 + i % 90 for i in range(23)], [7, 9, 8], [11 + 3 * i % 80 for i in range(14)]]
# In float32 another order of the same sums: measured are 2e-6 of logits of up to 4.
BOUND = 2e-5
WHOLE = frozenset({"granitemoehybrid", "jamba", "lfm2_moe", "minimax", "nemotron_h", "qwen3_next"})


@torch.inference_mode()
def fed_in_chunks(model: PreTrainedModel, prompts: Sequence[Sequence[int]], chunk: int, pad_id: int) -> torch.Tensor:
    """Logits [B, V] behind the prompts of a model whose forward is called chunk by chunk."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    accepted, cache = inspect.signature(model.forward).parameters, {}
    for start in range(0, width, chunk):
        stop = min(start + chunk, width)
        span = {"input_ids": ids[:, start:stop], "position_ids": places[:, start:stop]}
        inputs = {**span, "attention_mask": mask[:, :stop], **cache, "use_cache": True, "logits_to_keep": 1}
        outputs = model(**{name: value for name, value in inputs.items() if name in accepted})
        name = "cache" if "cache" in outputs else "past_key_values"
        cache = {name: outputs[name]}
    return outputs.logits[:, -1].float()


def first_logits(engine: Engine, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    (step,) = engine.generate(prompts, GenerationSettings(1, ignore_eos=True, keep_logits=True))
    assert step.logits is not None
    return step.logits


def open_engine(source: ModelSource, chunk: int | None, dtype: str = "float32", **given: object) -> Engine:
    return Engine.open(source, cache=ExpertBudget.parse("50%"), device="cpu", dtype=dtype, prefill_chunk=chunk, **given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_equal_transformers_fed_the_same(dtype: str) -> None:
    source = resolve_model("demo")
    reference = load_reference(source.folder, getattr(torch, dtype))
    for chunk in (5, 22, 40):
        with open_engine(source, chunk, dtype) as engine:
            for prompts in (PROMPTS[:1], PROMPTS):
                expected = fed_in_chunks(reference, prompts, chunk, engine.tokenizer.pad_token_id)
                assert torch.equal(first_logits(engine, prompts), expected)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_chunks_are_within_the_bound_of_the_whole_prompt(family: str, tmp_path: Path) -> None:
    """Families that keep a running state take prompts whole, whatever is asked for."""
    source = resolve_model(str(build_tiny_model(family, tmp_path / family)))
    with open_engine(source, None) as engine:
        whole = first_logits(engine, PROMPTS)
    with open_engine(source, 6) as engine:
        parts = first_logits(engine, PROMPTS)
    assert (parts - whole).abs().max() <= (0.0 if family in WHOLE else BOUND)


def test_tokens_go_on_behind_chunks_as_behind_the_whole_prompt() -> None:
    source = resolve_model("demo")
    answers = []
    for chunk in (None, 7):
        with open_engine(source, chunk) as engine:
            steps = list(engine.generate(PROMPTS, GenerationSettings(24, ignore_eos=True)))
            answers.append([step.token_ids for step in steps])
            assert [step.phase for step in steps] == ["prefill"] + ["decode"] * 23
    assert answers[0] == answers[1]


def recorded(chunk: int, path: Path) -> RoutingTrace:
    source = resolve_model("demo")
    manifest = TraceManifest.of_recording(source.name, source.fingerprint, "a test")
    with TraceWriter(path, manifest) as trace, open_engine(source, chunk, trace=trace) as engine:
        list(engine.generate(PROMPTS, GenerationSettings(3, ignore_eos=True)))
    return read_trace(path)


def test_every_chunk_is_an_iteration_of_the_sequences_it_holds_tokens_of(tmp_path: Path) -> None:
    trace = recorded(8, tmp_path / "t.parquet")
    tokens = [request.tokens.tolist() for request in trace.requests]
    # Of 23 columns the last three hold the second prompt, the last fourteen the third.
    assert tokens == [[8, 8, 7, 1, 1], [3, 1, 1], [7, 7, 1, 1]]
    for request in trace.requests:
        assert request.phases == ("prefill",) * (len(request) - 2) + ("decode",) * 2
        for t, count in enumerate(request.tokens.tolist()):
            assert all(request.routed_counts(t, layer).sum() == 2 * count for layer in range(trace.manifest.layers))


def test_maps_and_counts_of_chunks_make_up_those_of_the_whole(tmp_path: Path) -> None:
    chunked, whole = recorded(8, tmp_path / "a.parquet"), recorded(100, tmp_path / "b.parquet")
    layers, experts = whole.manifest.layers, whole.manifest.experts
    for parts, one in zip(chunked.requests, whole.requests, strict=True):
        prefills = [t for t, phase in enumerate(parts.phases) if phase == "prefill"]
        summed, expected = torch.zeros(layers, experts), torch.zeros(layers, experts)
        for layer in range(layers):
            for t in prefills:
                summed[layer, parts.routed(t, layer).tolist()] += torch.tensor(parts.routed_counts(t, layer)).float()
            expected[layer, one.routed(0, layer).tolist()] = torch.tensor(one.routed_counts(0, layer)).float()
        assert torch.equal(summed, expected)
        shares = parts.tokens[prefills] / parts.tokens[prefills].sum()
        mean = (parts.maps(experts)[prefills] * shares[:, None, None]).sum(axis=0)
        assert abs(mean - one.maps(experts)[0]).max() < 2e-3


def test_each_chunk_is_given_to_the_library_by_a_name_of_its_own() -> None:
    source = resolve_model("demo")
    shape = source.fingerprint
    library = ResidentIndex(shape.layers, shape.experts, shape.hidden_size, capacity=50, distance=3)
    with open_engine(source, 8, library=library) as engine:
        list(engine.generate(PROMPTS, GenerationSettings(3, ignore_eos=True)))
        engine.drain()
    assert len(library) == 5 + 3 + 4


@pytest.mark.parametrize("policy", ["finemoe", "adaptive"])
def test_replay_equals_live_in_chunks(policy: str, tmp_path: Path) -> None:
    prompts = ["One river runs to the sea, and the king went on to the water at night, for i in range(10): print(i)"]
    scene = set_scene(resolve_model("demo"), ["Rivers carry water.", "def add(a, b):"], prompts, 4, tmp_path)
    live, slots = run_live(scene, policy, "40%", 0.3, tmp_path / "t.parquet", prefill_chunk=12)
    assert len(read_trace(tmp_path / "t.parquet").requests[0]) > 5
    assert live == run_replay(scene, policy, slots, 0.3, tmp_path / "t.parquet")


def test_a_batch_is_cut_into_its_chunks() -> None:
    batch = PaddedBatch([[1, 2, 3, 4, 5], [6, 7]], 0, torch.device("cpu"), chunk=2)
    seen = []
    while True:
        inputs = batch.inputs()
        seen.append((inputs["input_ids"].tolist(), batch.prompt_tokens(0), batch.prompt_tokens(1)))
        assert inputs["attention_mask"].shape[1] == 2 * len(seen) or not batch.has_more
        if not batch.has_more:
            break
        batch.next_chunk()
    assert seen == [([[1, 2], [0, 0]], 2, 0), ([[3, 4], [0, 6]], 2, 1), ([[5], [7]], 1, 1)]
    batch.append([8, 9])
    inputs = batch.inputs()
    assert [inputs[name].tolist() for name in ("input_ids", "position_ids")] == [[[8], [9]], [[5], [2]]]
    assert inputs["attention_mask"].shape == (2, 6)


def test_a_chunk_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="a prefill chunk of 0 tokens is none"):
        open_engine(resolve_model("demo"), 0)

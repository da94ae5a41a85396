"""Routing replayed from a trace: what is recorded of the replay is the trace itself."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.errors import TraceError
from engine.families import find_moe_layers
from engine.replayed_routing import ReplayedRouting
from engine.resident import ResidentModel
from engine.source import ModelSource
from engine.steps import GenerationSettings, Step
from engine.synthetic import SHAPES, build_whole, synthesize, synthetic_config, synthetic_source
from engine.synthetic_routing import bundled_trace, draw_trace, map_records, shape_trace
from engine.trace_files import TraceWriter, read_trace
from engine.traces import RoutingTrace, TracedRequest, TraceManifest
from store.index import ResidentIndex
from tests.engine.sample_traces import sample_manifest, sample_trace
from tests.engine.tiny_shapes import TINY

CPU = torch.device("cpu")
SHAPE = (3, 6, 2)
HIDDEN, TINY_HIDDEN = 24, 64


@pytest.fixture(autouse=True)
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in TINY.items():
        monkeypatch.setitem(SHAPES, name, shape)


def learned_trace() -> RoutingTrace:
    """Prefills of five tokens and six steps, with distributions and embeddings as if they were a model's."""
    trace = draw_trace(SHAPE, 3, 5, 7)
    rng = np.random.default_rng(1)
    requests = []
    for request in trace.requests:
        probabilities = rng.random((len(request), *SHAPE[:2])).astype(np.float32) + 0.01
        probabilities /= probabilities.sum(axis=2, keepdims=True)
        embeddings = rng.normal(size=(len(request), HIDDEN)).astype(np.float32)
        requests.append(replace(request, probabilities=probabilities.astype(np.float16), embeddings=embeddings))
    manifest = TraceManifest("learned", *SHAPE, "full", HIDDEN, None, "drawn")
    return RoutingTrace(manifest, tuple(requests))


def fitting_trace() -> RoutingTrace:
    """The same for the tiny shapes."""
    return shape_trace(learned_trace(), SHAPE[0], SHAPE, TINY_HIDDEN, 7, "t.parquet")


def answer(model: Engine | ResidentModel, routing: ReplayedRouting, request: TracedRequest) -> list[Step]:
    routing.begin(request)
    prompt = list(range(1, 1 + int(request.tokens[0])))
    return list(model.generate([prompt], GenerationSettings(max_new_tokens=len(request), ignore_eos=True)))


def record_replay(source: ModelSource, trace: RoutingTrace, order: list[int], target: Path) -> RoutingTrace:
    loaded = synthesize(source, CPU, torch.float32)
    routing = ReplayedRouting(loaded.model, loaded.layers, trace.requests, CPU)
    routing.attach()
    manifest = TraceManifest.of_recording(source.name, source.fingerprint, "a replay")
    with (
        TraceWriter(target, manifest) as writer,
        Engine.open(
            source, cache=ExpertBudget.parse("100%"), device="cpu", dtype="float32", loaded=loaded, trace=writer
        ) as engine,
    ):
        for number in order:
            answer(engine, routing, trace.requests[number])
    return read_trace(target)


@pytest.mark.parametrize("family", TINY)
def test_what_is_recorded_of_a_replay_is_the_trace(family: str, tmp_path: Path) -> None:
    trace = fitting_trace()
    recorded = record_replay(synthetic_source(family), trace, [2, 0], tmp_path / "t.parquet")
    for expected, found in zip((trace.requests[2], trace.requests[0]), recorded.requests, strict=True):
        assert found.phases == expected.phases
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.keys(SHAPE[1]) == [[sorted(keys) for keys in step] for step in expected.keys(SHAPE[1])]
        first = int(expected.offsets[SHAPE[0]])
        assert found.counts[:first].tolist() == expected.counts[:first].tolist()
        assert found.probabilities is not None and expected.probabilities is not None
        np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=2e-3)
        assert found.embeddings is not None and expected.embeddings is not None
        np.testing.assert_allclose(found.embeddings[:, :HIDDEN], expected.embeddings[:, :HIDDEN], atol=1e-5)
        assert not found.embeddings[:, HIDDEN:].any()


def test_transformers_itself_is_routed_alike() -> None:
    trace = fitting_trace()
    source = synthetic_source("qwen2_moe")
    model = build_whole(source.config, CPU, torch.float32)
    layers = find_moe_layers(model)
    routing = ReplayedRouting(model, layers, trace.requests, CPU)
    routing.attach()
    seen: list[list[int]] = []
    layers[1].experts.register_forward_pre_hook(lambda module, inputs: seen.extend(inputs[1].tolist()))
    answer(ResidentModel(source, model, CPU), routing, trace.requests[1])
    expected = trace.requests[1]
    assert [set(row) for row in seen[5:]] == [set(expected.routed(t, 1).tolist()) for t in range(1, len(expected))]
    ids, counts = np.unique(seen[:5], return_counts=True)
    place = slice(*expected.offsets[1:3])
    assert ids.tolist() == expected.experts[place].tolist()
    assert counts.tolist() == expected.counts[place].tolist()
    assert all(len(set(row)) == 2 for row in seen[:5])


def test_the_devices_steps_follow_the_trace_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing runs the model, and tokens are run ahead: neither puts the replay out of step."""
    pytest.importorskip("triton")
    from engine import device_decoder
    from tests.engine.table_experts import EagerExperts

    if not torch.cuda.is_available():
        monkeypatch.setattr(device_decoder, "ExpertProducts", EagerExperts)
    trace = fitting_trace()
    source = synthetic_source("qwen2_moe")
    loaded = synthesize(source, CPU, torch.float32)
    routing = ReplayedRouting(loaded.model, loaded.layers, trace.requests, CPU)
    routing.attach()
    maps = ResidentIndex(*SHAPE[:2], source.fingerprint.hidden_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with Engine.open(
            source,
            cache=ExpertBudget.parse("60%"),
            device="cpu",
            dtype="float32",
            loaded=loaded,
            policy="lru",
            library=maps,
            executor="device",
        ) as engine:
            for number in (1, 2):
                steps = answer(engine, routing, trace.requests[number])
                assert len(steps) == len(trace.requests[number])
            engine.drain()
    expected = [record for number in (1, 2) for record in map_records(trace.requests[number], SHAPE[1])]
    assert len(maps) == len(expected)
    for row, record in enumerate(expected):
        np.testing.assert_allclose(maps.probabilities(row), record.probabilities, atol=2e-3)


def test_a_trace_is_cut_to_the_first_layers_and_to_answers_of_a_length() -> None:
    trace = learned_trace()
    cut = shape_trace(trace, 2, SHAPE, HIDDEN, 4, "t.parquet")
    assert (cut.manifest.layers, cut.manifest.hidden_size) == (2, HIDDEN)
    wide = shape_trace(trace, 2, SHAPE, HIDDEN + 3, 4, "t.parquet").requests[0].embeddings
    assert wide is not None and trace.requests[0].embeddings is not None
    np.testing.assert_array_equal(wide, np.pad(trace.requests[0].embeddings[:4], ((0, 0), (0, 3))))
    for whole, part in zip(trace.requests, cut.requests, strict=True):
        assert part.keys(6) == [layers[:2] for layers in whole.keys(6)[:4]]
        assert part.probabilities is not None and part.probabilities.shape == (4, 2, 6)
    assert shape_trace(trace, 3, SHAPE, HIDDEN - 1, 4, "t.parquet").requests[0].embeddings is None


def test_decode_steps_alone_begin_with_one_token() -> None:
    trace = shape_trace(sample_trace(2, 4, sample_manifest(*SHAPE)), 3, SHAPE, HIDDEN, 3, "t.parquet")
    assert [request.tokens.tolist() for request in trace.requests] == [[1, 1, 1]] * 2


def test_a_trace_of_another_shape_or_without_steps_is_refused() -> None:
    trace = learned_trace()
    message = r"t\.parquet: its routing is of 3 layers of 6 experts, top 2, the synthetic model has 4 layers of 6"
    with pytest.raises(TraceError, match=message):
        shape_trace(trace, 4, (4, 6, 2), HIDDEN, 4, "t.parquet")
    with pytest.raises(TraceError, match="no request has a decode step"):
        shape_trace(trace, 3, SHAPE, HIDDEN, 1, "t.parquet")


def test_counts_that_are_not_of_k_experts_a_token_are_refused() -> None:
    source = synthetic_source("mixtral")
    loaded = synthesize(source, CPU, torch.float32)
    (request, *_) = fitting_trace().requests
    wrong = replace(request, counts=np.ones_like(request.counts))
    with pytest.raises(TraceError, match="request 0 routes 5 tokens to"):
        ReplayedRouting(loaded.model, loaded.layers, [wrong], CPU)


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in TINY])
def test_bundled_routing_is_of_the_real_shape(name: str) -> None:
    trace = bundled_trace(name)
    if name == "qwen3-30b-a3b":
        assert trace is None
        return
    assert trace is not None
    config = synthetic_config(name)
    source = synthetic_source(name, 1)
    whole = (config.num_hidden_layers, source.fingerprint.experts, source.fingerprint.top_k)
    shaped = shape_trace(trace, 1, whole, source.fingerprint.hidden_size, 48, "bundled")
    assert len(shaped.requests) >= 8
    assert all(request.phases[0] == "prefill" and len(request) == 48 for request in shaped.requests)
    assert shaped.manifest.hidden_size == source.fingerprint.hidden_size
    assert trace.manifest.hidden_size == 64
    assert "/" not in trace.manifest.model

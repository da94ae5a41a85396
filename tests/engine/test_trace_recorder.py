"""Recording from a real engine: what the trace says against what the model's own gates chose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.source import resolve_model
from engine.steps import GenerationSettings, Step
from engine.trace_files import TraceWriter, read_trace
from engine.traces import RoutingTrace, TraceManifest
from store.index import ResidentIndex


def record(
    path: Path, prompts: list[str], with_library: bool, gate_inputs: bool = False
) -> tuple[RoutingTrace, list[Step], ResidentIndex | None]:
    source = resolve_model("demo")
    shape = source.fingerprint
    manifest = TraceManifest(
        "demo",
        shape.layers,
        shape.experts,
        shape.top_k,
        "full",
        shape.hidden_size,
        shape.to_dict(),
        "a test",
        gate_inputs=gate_inputs,
    )
    library = ResidentIndex(shape.layers, shape.experts, shape.hidden_size) if with_library else None
    with (
        TraceWriter(path, manifest) as trace,
        Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu", library=library, trace=trace) as engine,
    ):
        ids = [engine.encode_text(prompt) for prompt in prompts]
        steps = list(engine.generate(ids, GenerationSettings(4, ignore_eos=True)))
        engine.drain()
    return read_trace(path), steps, library


@pytest.mark.parametrize("with_library", [False, True])
def test_a_row_an_iteration_and_sequence(tmp_path: Path, with_library: bool) -> None:
    trace, steps, library = record(tmp_path / "t.parquet", ["One river.", "Many rivers run to the sea."], with_library)
    assert len(trace.requests) == 2
    top_k = trace.manifest.top_k
    for request in trace.requests:
        assert request.phases == ("prefill", "decode", "decode", "decode")
        for iteration, tokens in enumerate(request.tokens.tolist()):
            for layer in range(trace.manifest.layers):
                start = iteration * request.layers + layer
                counts = request.counts[request.offsets[start] : request.offsets[start + 1]]
                assert counts.sum() == tokens * top_k
        chosen = request.probabilities[1:].astype(np.float32)
        uses = request.uses(trace.manifest.experts)[1:] > 0
        assert np.all(np.where(uses, chosen, 2).min(axis=2) >= np.where(uses, -1, chosen).max(axis=2))
        assert np.abs(request.embeddings).any(axis=1).all()
    if library is not None:
        assert len(library) == trace.iterations
    routed = [step.traffic.routed for step in steps]
    by_iteration = [
        sum(
            len(np.union1d(trace.requests[0].routed(t, layer), trace.requests[1].routed(t, layer)))
            for layer in range(trace.manifest.layers)
        )
        for t in range(4)
    ]
    assert by_iteration == routed


@pytest.mark.parametrize("with_library", [False, True])
def test_gate_inputs_explain_the_recorded_distributions(tmp_path: Path, with_library: bool) -> None:
    prompts = ["One river.", "Many rivers run to the sea."]
    trace, _, _ = record(tmp_path / "t.parquet", prompts, with_library, gate_inputs=True)
    gates = trace.manifest.gates
    for request in trace.requests:
        assert not request.gate_inputs[0].any()
        for layer in range(trace.manifest.layers):
            decided = gates.probabilities(layer, request.gate_inputs[1:, layer])
            # The model computes in bfloat16.
            assert np.abs(decided - request.probabilities[1:, layer]).max() < 0.01

"""A live engine under a virtual clock beside the replay of the trace it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.hardware import Hardware
from engine.live_policies import PolicyInputs, build_policy
from engine.records import IterationRecord
from engine.replay import Replay, ReplayOutcome
from engine.router_gates import RouterGates
from engine.source import ModelSource
from engine.steps import GenerationSettings
from engine.streamed import Streamed
from engine.trace_files import TraceWriter, read_trace
from engine.traces import RoutingTrace, TraceManifest
from store.index import ResidentIndex

DISTANCE = 3


@dataclass(frozen=True, slots=True)
class Counts:
    """What both sides have to agree on."""

    hits: int
    late: int
    misses: int
    bytes_moved: int
    wasted_bytes: int
    stall_microseconds: int


@dataclass(frozen=True, slots=True)
class Scene:
    """A model, the routing of earlier requests, and requests to answer.

    Attributes:
        history: fills the store and the request-level counts.
        future: the routing of the answers, for the policies that know it.
        expert_bytes: size of an expert.
    """

    source: ModelSource
    history: RoutingTrace
    future: RoutingTrace
    prompts: Sequence[str]
    tokens: int
    expert_bytes: int

    def clock(self, layer_seconds: float) -> Hardware:
        """The time model of both sides: an expert takes 1 s over the link."""
        size = self.expert_bytes
        return Hardware(size, float(size), 0.0, layer_seconds, chunk_bytes=size // 4, token_seconds=layer_seconds / 10)


def set_scene(source: ModelSource, earlier: Sequence[str], prompts: Sequence[str], tokens: int, folder: Path) -> Scene:
    """Answer everything once to know its routing."""
    history, size = _record(source, earlier, tokens, folder / "history.parquet")
    future, _ = _record(source, prompts, tokens, folder / "future.parquet")
    return Scene(source, history, future, prompts, tokens, size)


def run_live(
    scene: Scene, policy: str, cache: str, layer_seconds: float, path: Path, prefill_chunk: int | None = None
) -> tuple[Counts, int]:
    """Answer the prompts under the policy; counts and slots. The trace goes to ``path``."""
    with (
        TraceWriter(path, _manifest(scene.source)) as trace,
        Engine.open(
            scene.source,
            cache=ExpertBudget.parse(cache),
            device="cpu",
            library=_fill_library(scene.history),
            policy=policy,
            distance=DISTANCE,
            history=scene.history,
            future=scene.future,
            clock=scene.clock(layer_seconds),
            trace=trace,
            prefill_chunk=prefill_chunk,
        ) as engine,
    ):
        _answer(engine, scene.prompts, scene.tokens)
        traffic, slots = engine.traffic, engine.slots
    moved = traffic.bytes_on_demand + traffic.bytes_prefetched
    stall = round(traffic.stall_seconds * 1e6)
    return Counts(traffic.hits, traffic.late, traffic.misses, moved, traffic.bytes_wasted, stall), slots


def run_replay(scene: Scene, policy: str, slots: int, layer_seconds: float, path: Path) -> Counts:
    """Replay the trace of ``run_live`` under the same policy."""
    trace = read_trace(path)
    shape, library = trace.manifest, _fill_library(scene.history)
    inputs = PolicyInputs(shape.layers, shape.experts, shape.top_k, DISTANCE, library, scene.history, future=trace)
    built = build_policy(policy, inputs, lambda: _gates(trace))
    streamed, clock = Streamed(built, shape.experts, library), scene.clock(layer_seconds)
    outcome = Replay(trace, streamed, clock, slots, in_place=False).run(warm_up=0)
    assert outcome.prefill is not None
    phases = [outcome, outcome.prefill]
    return Counts(
        hits=sum(_count(phase, phase.hit) for phase in phases),
        late=sum(_count(phase, phase.late) for phase in phases),
        misses=sum(_count(phase, phase.miss) for phase in phases),
        bytes_moved=sum(phase.bytes_moved for phase in phases),
        wasted_bytes=sum(phase.wasted_bytes for phase in phases),
        stall_microseconds=round(sum(phase.stall_seconds for phase in phases) * 1e6),
    )


def _count(outcome: ReplayOutcome, share: float) -> int:
    return round(share * outcome.routed)


def _record(source: ModelSource, prompts: Sequence[str], tokens: int, path: Path) -> tuple[RoutingTrace, int]:
    with (
        TraceWriter(path, _manifest(source)) as trace,
        Engine.open(source, cache=ExpertBudget.parse("100%"), device="cpu", trace=trace) as engine,
    ):
        _answer(engine, prompts, tokens)
        size = engine.expert_bytes
    return read_trace(path), size


def _answer(engine: Engine, prompts: Sequence[str], tokens: int) -> None:
    for prompt in prompts:
        ids = [engine.encode_text(prompt)]
        for _ in engine.generate(ids, GenerationSettings(tokens, ignore_eos=True)):
            pass


def _manifest(source: ModelSource) -> TraceManifest:
    return TraceManifest.of_recording(source.name, source.fingerprint, "a test", gate_inputs=True)


def _fill_library(history: RoutingTrace) -> ResidentIndex:
    shape = history.manifest
    assert shape.hidden_size is not None
    library = ResidentIndex(shape.layers, shape.experts, shape.hidden_size, capacity=60, distance=DISTANCE)
    for request in history.requests:
        maps = request.maps(shape.experts)
        assert request.embeddings is not None
        library.publish(
            [
                IterationRecord(
                    request.request, t, phase, "a test", int(request.tokens[t]), request.embeddings[t], maps[t]
                )
                for t, phase in enumerate(request.phases)
            ]
        )
    return library


def _gates(trace: RoutingTrace) -> RouterGates:
    assert trace.manifest.gates is not None
    return trace.manifest.gates

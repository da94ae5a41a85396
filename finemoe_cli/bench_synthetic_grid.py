"""The grid of ``finemoe bench --synthetic``: a trace's requests walked through by every executor, policy and budget."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from statistics import mean
from typing import Any

import torch

from engine.benchmarking import Generating, Workload, answer_prompts
from engine.budget import ExpertBudget, format_bytes
from engine.checkpoint import LoadedModel
from engine.decoding import ExecutorChoice
from engine.devices import release_memory
from engine.errors import DeviceError, UnsupportedModelError
from engine.families import find_moe_layers
from engine.footprint import ModelFootprint
from engine.hardware import Hardware
from engine.links import CHUNK_BYTES
from engine.live_policies import SEARCHING
from engine.measures import measure_requests
from engine.measuring import LinkMeasure, measure_link
from engine.replayed_routing import ReplayedRouting
from engine.resident import ResidentModel
from engine.room import MemoryRoom
from engine.source import ModelSource
from engine.steps import Step
from engine.synthetic import build_whole, synthesize
from engine.traces import RoutingTrace, TracedRequest
from finemoe_cli.bench_engines import BenchEngines
from finemoe_cli.bench_plan import DRIVEN, BenchPlan, Cell
from finemoe_cli.bench_records import Row, describe_knowledge, make_record
from finemoe_cli.bench_stores import BenchStore
from finemoe_cli.bench_synthetic_records import LinkBound, link_fields
from finemoe_cli.bench_turns import take_turns
from finemoe_cli.console import note
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.quantities import count_of
from finemoe_cli.settings import Settings
from store.bench_runs import BenchRecord

ALL_RESIDENT = "all-resident"
BATCHED, PREFILLING = "resident-batched", "grouped_mm"
RESIDENTS = {"resident-eager": "eager", "resident": PREFILLING, BATCHED: "batched_mm"}
"""transformers' implementations by the names of their rows. batched_mm copies the weights of every token's experts,
more than there is memory for in a prefill, which another implementation computes."""
_EVERYTHING = ExpertBudget.parse("100%")

STORE_SHARE = 0.7
_SETTLING = 2


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticWalk:
    """Requests answered one after the other, with as many tokens as their routing is known for.

    Attributes:
        new_tokens: of an answer at most.
        settling: requests that bring the cache to what it holds in the long run, not measured; the first is the
            longest of all, so that what is captured for its length serves the others.
        tests: requests that are measured.
        store: routing that policies know beforehand.
    """

    new_tokens: int
    settling: tuple[TracedRequest, ...]
    tests: tuple[TracedRequest, ...]
    store: RoutingTrace

    @classmethod
    def of(cls, trace: RoutingTrace, new_tokens: int, store: int, tests: int) -> SyntheticWalk:
        """Divide a trace as ``bench replay`` does, taking so many requests of either side at most.

        Raises:
            TraceError: it cannot be divided.
        """
        known, test = trace.split(STORE_SHARE)
        chosen = test.requests[:tests]
        kept = known.requests[:store]
        longest = max(chosen + kept, key=length_of)
        return cls(new_tokens, (longest, *kept[:_SETTLING]), chosen, RoutingTrace(trace.manifest, kept))


def length_of(request: TracedRequest) -> int:
    """Tokens of its prompt and its answer."""
    return int(request.tokens[0]) + len(request)


class SyntheticGrid:
    """Measures a plan row by row on a model with random weights.

    Args:
        room: found to hold the smallest of the plan's budgets.
    """

    def __init__(
        self,
        settings: Settings,
        source: ModelSource,
        plan: BenchPlan,
        walks: Sequence[SyntheticWalk],
        store: BenchStore,
        size: ModelFootprint,
        room: MemoryRoom,
        device: torch.device,
        dtype: torch.dtype,
        identity: Mapping[str, Any],
        interrupt: Interruptible,
    ) -> None:
        self._settings = settings
        self._source = source
        self._plan = plan
        self._walks = walks
        self._store = store
        self._size = size
        self._room = room
        self._device = device
        self._dtype = dtype
        self._identity = identity
        self._interrupt = interrupt
        self._measured = 0

    def measure(self) -> Generator[BenchRecord, None, None]:
        """Yield a record once its row, and those it takes turns with, have been measured.

        Raises:
            KeyboardInterrupt: between two tokens, once the interrupt is requested.
        """
        yield from self._measure_residents()
        note(f"making {format_bytes(self._size.experts_bytes)} of random expert weights")
        loaded = synthesize(self._source, self._device, self._dtype)
        routing = self._attach(loaded.model)
        link = measure_link(loaded.experts, self._device)
        note(f"link: {link.bandwidth / 1e9:.1f} GB/s for {format_bytes(loaded.experts.expert_bytes)}")
        for walk in self._walks:
            yield from self._measure_walk(walk, loaded, routing, link)

    def _attach(self, model: Any) -> ReplayedRouting:
        requests = [request for walk in self._walks for request in (*walk.settling, *walk.tests)]
        routing = ReplayedRouting(model, find_moe_layers(model), requests, self._device)
        routing.attach()
        return routing

    def _measure_residents(self) -> Iterator[BenchRecord]:
        """transformers' own experts implementations, all experts on the device, with the same routing."""
        refused = self._room.refuse_resident(self._size, self._longest)
        if refused is None:
            try:
                model = build_whole(self._source.config, self._device, self._dtype)
            except torch.OutOfMemoryError:
                refused = "the device has no memory for it"
        if refused is not None:
            note(f"left out: transformers with all experts resident: {refused}")
            return
        routing = self._attach(model)
        resident = ResidentModel(self._source, model, self._device)
        for walk in self._walks:
            turns = {
                name: partial(self._run_resident, resident, routing, name, chosen, walk)
                for name, chosen in RESIDENTS.items()
            }
            for repeated in take_turns(turns, self._plan.repetitions):
                yield self._record(walk, repeated, None)
        routing.detach()
        del model, resident, routing, turns
        release_memory(self._device)

    def _run_resident(
        self, model: ResidentModel, routing: ReplayedRouting, name: str, implementation: str, walk: SyntheticWalk
    ) -> tuple[Row, list[list[Step]]]:
        experts = self._size.layers * self._size.experts
        row = Row(name, None, "100%", f"transformers {implementation}", model.expert_bytes, experts, None)
        first = PREFILLING if name == BATCHED else implementation

        def use(implementation: str) -> None:
            if model.implementation != implementation:
                model.use(implementation)

        def answer(requests: Sequence[TracedRequest]) -> list[list[Step]]:
            return self._answer(model, routing, requests, lambda: use(first), lambda: use(implementation))

        answer(walk.settling[:1])
        return row, answer(walk.tests)

    def _measure_walk(
        self, walk: SyntheticWalk, loaded: LoadedModel, routing: ReplayedRouting, link: LinkMeasure
    ) -> Iterator[BenchRecord]:
        engines = BenchEngines(self._settings, self._source, self._distance, None, loaded)
        resident: dict[str, float] = {}
        cells = [Cell(ALL_RESIDENT, _EVERYTHING, None, executor) for executor in self._plan.executors]
        turns = {cell.describe(): partial(self._run, engines, routing, cell, walk) for cell in cells}
        for repeated in take_turns(turns, self._plan.repetitions):
            row = repeated[0][0]
            steps = [step for _, requests in repeated for request in requests for step in request[1:]]
            resident[row.executor] = mean(step.seconds for step in steps)
            yield self._record(walk, repeated, LinkBound(link.bandwidth, resident[row.executor]))
        engines.history = walk.store
        if resident:
            layer_seconds = min(resident.values()) / self._size.layers
            engines.hardware = Hardware(
                loaded.experts.expert_bytes, link.bandwidth, link.latency_seconds, layer_seconds, CHUNK_BYTES
            )
        for _, cells_of_budget in groupby(self._plan.cells, key=lambda cell: cell.cache):
            turns = {cell.describe(): partial(self._run, engines, routing, cell, walk) for cell in cells_of_budget}
            for repeated in take_turns(turns, self._plan.repetitions):
                executor = repeated[0][0].executor
                yield self._record(walk, repeated, LinkBound(link.bandwidth, resident.get(executor)))

    def _run(
        self, engines: BenchEngines, routing: ReplayedRouting, cell: Cell, walk: SyntheticWalk
    ) -> tuple[Row, list[list[Step]]]:
        """One repetition on an engine of its own."""
        whole = cell.policy == ALL_RESIDENT
        # What is automatic is made of the memory there is.
        budget = 0 if cell.cache.is_automatic else cell.cache.resolve(self._size.slots_bytes, None)
        if refused := self._room.refuse_offloaded(self._size, budget, self._longest):
            raise DeviceError(refused)
        before = walk.tests if whole else walk.settling
        library = self._store.library(cell.state) if cell.state and cell.policy in SEARCHING else None
        future = RoutingTrace(walk.store.manifest, (*before, *walk.tests))
        with engines.open(
            "lru" if whole else cell.policy, cell.cache, executor=cell.executor, library=library, future=future
        ) as engine:
            self._answer(engine, routing, before)
            if library is not None and cell.state is not None:
                library.learning = cell.state.learning
            answered = self._answer(engine, routing, walk.tests)
            if cell.executor is ExecutorChoice.DEVICE and engine.executor is ExecutorChoice.HOST:
                raise UnsupportedModelError("the device cannot drive this model's decode steps")
            sizes = (engine.budget_bytes, engine.slots, engine.distance)
            return Row(cell.policy, cell.state, cell.cache.text, DRIVEN[engine.executor], *sizes), answered

    def _answer(
        self,
        model: Generating,
        routing: ReplayedRouting,
        requests: Sequence[TracedRequest],
        before: Callable[[], None] = lambda: None,
        between: Callable[[], None] = lambda: None,
    ) -> list[list[Step]]:
        """The steps of each request; ``before`` is called ahead of it, ``between`` behind every step."""

        def poll() -> None:
            between()
            if self._interrupt.requested:
                raise KeyboardInterrupt

        answered = []
        for request in requests:
            before()
            routing.begin(request)
            answered += answer_prompts(model, [prompt_of(request)], len(request), poll)
        return answered

    def _record(
        self, walk: SyntheticWalk, repeated: Sequence[tuple[Row, list[list[Step]]]], bound: LinkBound | None
    ) -> BenchRecord:
        row = repeated[0][0]
        requests = [request for _, answered in repeated for request in answered]
        measures = measure_requests(requests)
        self._measured += 1
        tpot = "" if measures.tpot is None else f", TPOT {measures.tpot.mean * 1e3:.1f} ms"
        hit = f", hit {measures.decode.hit_rate:.1%}" if measures.decode.routed else ""
        walked = f"{count_of(len(walk.tests), 'request')} of up to {count_of(walk.new_tokens, 'token')}"
        note(f"{self._measured}/{self._rows} {row.describe()}, {walked}{tpot}{hit}")
        workload = Workload(
            None, walk.new_tokens, *(tuple(map(prompt_of, side)) for side in (walk.settling, walk.tests))
        )
        # Random weights answer nothing that could be compared.
        about = {"reference": None, "tokens_equal": None, **describe_knowledge(row, self._store, walk.store)}
        record = make_record(row, workload, measures, len(repeated), about, self._identity)
        figures = {**record.measures, **link_fields(requests, row.by_device, bound)}
        if row.policy == BATCHED:
            figures.update({name: None for name in figures if name.startswith("ttft_ms")})
        return replace(record, measures=figures)

    @property
    def _longest(self) -> int:
        return max(length_of(request) for walk in self._walks for request in (*walk.settling, *walk.tests))

    @property
    def _distance(self) -> int:
        return self._plan.distance or self._store.maps.distance

    @property
    def _rows(self) -> int:
        """How many rows there will be at most."""
        return len(self._walks) * (len(self._plan.cells) + len(self._plan.executors) + len(RESIDENTS))


def prompt_of(request: TracedRequest) -> tuple[int, ...]:
    """Any tokens, as many as the request's prompt has."""
    return tuple(range(1, 1 + int(request.tokens[0])))

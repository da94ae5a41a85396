"""The grid of live ``finemoe bench``: every combination on the real engine, a record each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from typing import Any

from engine.benchmarking import BenchLibrary, Generating, StoreState, Workload, answer_prompts, tokens_of
from engine.decoding import ExecutorChoice
from engine.devices import release_memory
from engine.engine import Engine
from engine.errors import DeviceError, UnsupportedModelError
from engine.live_policies import SEARCHING
from engine.measures import measure_requests
from engine.resident import ResidentModel
from engine.source import ModelSource
from engine.steps import GenerationSettings, Step
from engine.token_gaps import Difference, GapMeter
from engine.traces import RoutingTrace
from finemoe_cli.bench_engines import RECORDED, BenchEngines
from finemoe_cli.bench_plan import DRIVEN, BenchPlan, Cell
from finemoe_cli.bench_prompts import BenchPrompts
from finemoe_cli.bench_records import Row, describe_knowledge, describe_tokens, make_record
from finemoe_cli.bench_stores import BenchStore
from finemoe_cli.bench_turns import take_turns
from finemoe_cli.console import note, report_error
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.quantities import count_of
from finemoe_cli.settings import Settings
from store.bench_runs import BenchRecord

EAGER = "resident-eager"
RESIDENT = "resident"
_EVERYTHING = "100%"
_FILL_BATCH = 4
_LEAST_ANSWER = 16
"""Tokens of an answer on the store's side, however short those of the tests: a store of prefills alone says little."""

Pass = list[list[Step]]
"""The steps of every test of one repetition."""

Turn = Callable[[], tuple[Row, Pass]]


class LiveGrid:
    """Measures a plan row by row.

    Attributes:
        reference: the row whose tokens all others are compared with.
        differing: rows that generated other tokens.
    """

    def __init__(
        self,
        settings: Settings,
        source: ModelSource,
        plan: BenchPlan,
        prompts: BenchPrompts,
        store: BenchStore,
        identity: Mapping[str, Any],
        engines: BenchEngines,
        interrupt: Interruptible,
    ) -> None:
        self.reference = EAGER
        self.differing: list[str] = []
        self._settings = settings
        self._source = source
        self._plan = plan
        self._prompts = prompts
        self._store = store
        self._identity = identity
        self._interrupt = interrupt
        self._engines = engines
        self._futures: dict[Workload, RoutingTrace] = {}
        self._expected: dict[Workload, list[list[int | None]]] = {}
        self._gaps: dict[Workload, list[list[float]]] = {}
        self._measured = 0

    def measure(self) -> Generator[BenchRecord, None, None]:
        """Yield a record as soon as its row has been measured.

        Raises:
            KeyboardInterrupt: between two tokens, once the interrupt is requested.
        """
        yield from self._measure_residents()
        self._prepare()
        for workload in self._prompts.workloads:
            for _, cells in groupby(self._plan.cells, key=lambda cell: cell.cache):
                yield from self._take_turns(
                    workload, {cell.describe(): partial(self._repeat, cell, workload) for cell in cells}
                )

    def _prepare(self) -> None:
        """Fill a temporary store, and record the routing that policies are told beforehand."""
        origin = f"recorded from {self._prompts.dataset}"
        largest = max(self._plan.caches, key=lambda cache: (cache.share or 0, cache.size or 0))
        fill = self._plan.needs_maps and self._store.is_temporary
        if fill or self._plan.needs_history:
            note(f"answering {count_of(len(self._prompts.store), 'prompt')} of the store's side")
            library = self._store.maps if fill else None
            self._engines.history = self._engines.record(origin, largest, self._fill, library, self._plan.policies)
        for workload in self._prompts.workloads:
            note(f"recording the routing of {_describe(workload)}")

            def answer(engine: Engine, workload: Workload = workload) -> None:
                requests = answer_prompts(engine, workload.prompts, workload.new_tokens, self._poll)
                self._expected.setdefault(workload, tokens_of(requests[len(workload.warm_up) :]))

            self._futures[workload] = self._engines.record(origin, largest, answer)

    def _fill(self, engine: Engine) -> None:
        settings = GenerationSettings(max_new_tokens=max(_LEAST_ANSWER, *self._plan.new_tokens))
        prompts = self._prompts.store
        for start in range(0, len(prompts), _FILL_BATCH):
            with closing(engine.generate(prompts[start : start + _FILL_BATCH], settings)) as steps:
                for _ in steps:
                    self._poll()
        engine.drain()

    def _measure_residents(self) -> Iterator[BenchRecord]:
        """Plain transformers with every expert on the device: eager, whose tokens are the measure, and its default."""
        try:
            model = ResidentModel.open(self._source, device=self._settings.device.text, dtype=self._settings.dtype.text)
        except DeviceError as error:
            note(f"left out: the resident rows, for {error}; tokens are compared with those of {RECORDED}")
            self.reference = RECORDED
            return
        implementations = {EAGER: "eager", RESIDENT: model.default_implementation}
        for workload in self._prompts.workloads:
            turns = {
                name: partial(self._repeat_resident, model, name, chosen, workload)
                for name, chosen in implementations.items()
            }
            yield from self._take_turns(workload, turns)
        del model, turns
        release_memory(self._engines.device)

    def _repeat_resident(
        self, model: ResidentModel, name: str, implementation: str, workload: Workload
    ) -> tuple[Row, Pass]:
        model.use(implementation)
        experts = self._source.fingerprint.layers * self._source.fingerprint.experts
        row = Row(name, None, _EVERYTHING, f"transformers {implementation}", model.expert_bytes, experts, None)
        if name != EAGER:
            return row, self._pass(model, workload)
        meter = GapMeter(model)
        answered = self._pass(meter, workload)
        self._gaps[workload] = meter.gaps[len(workload.warm_up) :]
        return row, answered

    def _take_turns(self, workload: Workload, turns: Mapping[str, Turn]) -> Iterator[BenchRecord]:
        for repeated in take_turns(turns, self._plan.repetitions):
            yield self._record(repeated[0][0], workload, [one for _, one in repeated])

    def _repeat(self, cell: Cell, workload: Workload) -> tuple[Row, Pass]:
        """One repetition on an engine of its own, whose device memory is free again when this returns."""
        library = self._store.library(cell.state) if cell.state and cell.policy in SEARCHING else None
        future = self._futures[workload]
        with self._engines.open(
            cell.policy, cell.cache, executor=cell.executor, library=library, future=future
        ) as engine:
            answered = self._pass(engine, workload, library, cell.state)
            if cell.executor is ExecutorChoice.DEVICE and engine.executor is ExecutorChoice.HOST:
                raise UnsupportedModelError("the device cannot drive this model's decode steps")
            sizes = (engine.budget_bytes, engine.slots, engine.distance)
            return Row(cell.policy, cell.state, cell.cache.text, DRIVEN[engine.executor], *sizes), answered

    def _pass(
        self,
        model: Generating,
        workload: Workload,
        library: BenchLibrary | None = None,
        state: StoreState | None = None,
    ) -> Pass:
        """One repetition: the warm-up prompts, which nothing learns from, then the tests."""
        answer_prompts(model, workload.warm_up, workload.new_tokens, self._poll)
        if library is not None and state is not None:
            library.learning = state.learning
        return answer_prompts(model, workload.tests, workload.new_tokens, self._poll)

    def _record(self, row: Row, workload: Workload, passes: Sequence[Pass]) -> BenchRecord:
        """Compare a row's tokens with the reference's, tell of it, and make its record."""
        self._expected.setdefault(workload, tokens_of(passes[0]))
        difference = self._difference(workload, passes)
        if difference is not None and row.policy == RESIDENT:
            note(f"{row.executor} chose other tokens than transformers eager, as it may")
        elif difference is not None and row.by_device:
            note(f"{row.describe()} chose other tokens than {self.reference}, {_describe_difference(difference)}")
        elif difference is not None:
            self.differing.append(row.describe())
            report_error(f"{row.describe()} generated other tokens than {self.reference}")
        measures = measure_requests([request for one in passes for request in one])
        self._measured += 1
        tpot = "" if measures.tpot is None else f", TPOT {measures.tpot.mean * 1e3:.1f} ms"
        hit = f", hit {measures.decode.hit_rate:.1%}" if measures.decode.routed else ""
        note(f"{self._measured}/{self._rows} {row.describe()}, {_describe(workload)}{tpot}{hit}")
        checked = {"reference": self.reference, **describe_tokens(difference)}
        known = describe_knowledge(row, self._store, self._engines.history)
        return make_record(row, workload, measures, len(passes), {**checked, **known}, self._identity)

    def _difference(self, workload: Workload, passes: Sequence[Pass]) -> Difference | None:
        """Where the first repetition that chose other tokens than the reference did so."""
        expected, gaps = self._expected[workload], self._gaps.get(workload)
        found = (Difference.between(tokens_of(one), expected, gaps) for one in passes)
        return next((difference for difference in found if difference is not None), None)

    @property
    def _rows(self) -> int:
        """How many rows there will be at most."""
        residents = 2 if self.reference == EAGER else 0
        return len(self._prompts.workloads) * (len(self._plan.cells) + residents)

    def _poll(self) -> None:
        if self._interrupt.requested:
            raise KeyboardInterrupt


def _describe(workload: Workload) -> str:
    length = "as they are" if workload.prompt_length is None else f"of {count_of(workload.prompt_length, 'token')}"
    return f"{count_of(len(workload.tests), 'prompt')} {length} + {workload.new_tokens}"


def _describe_difference(difference: Difference) -> str:
    place = f"from token {difference.token + 1} of prompt {difference.prompt + 1} on"
    if difference.gap is None:
        return place
    return f"{place}, where eager's two best logits lie {difference.gap:.2g} apart"

"""The engines of a live bench: one model in memory, behind one policy and budget after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from engine.adaptive import AdaptivePlan
from engine.adaptive_choice import AdaptiveFit
from engine.budget import ExpertBudget
from engine.checkpoint import LoadedModel, load_model
from engine.decoding import ExecutorChoice, drives_itself
from engine.devices import choose_device, choose_dtype, free_bytes, release_memory
from engine.engine import Engine
from engine.errors import UnsupportedModelError
from engine.gate_probe import find_gates
from engine.hardware import Hardware
from engine.records import ExpertMapLibrary
from engine.slots import slot_bytes, slots_within
from engine.source import ModelSource
from engine.trace_files import TraceWriter, read_trace
from engine.traces import RoutingTrace, TraceManifest
from finemoe_cli.console import note, progress
from finemoe_cli.settings import Settings

ADAPTIVE = "adaptive"
RECORDED = "lru"
"""The policy behind which routing is recorded; which one it is changes nothing in it."""


class BenchEngines:
    """Opens engines that share one loaded model, so only one of them may be open at a time.

    Attributes:
        device: where they run.
        history: routing that policies are taught by; None where none of them is.
    """

    def __init__(
        self,
        settings: Settings,
        source: ModelSource,
        distance: int,
        hardware: Hardware | None,
        loaded: LoadedModel | None = None,
    ) -> None:
        """``hardware``: times of this machine, if they are known; ``loaded``: the model, to spare loading it."""
        self.device = choose_device(settings.device.text)
        self.history: RoutingTrace | None = None
        self._given = loaded
        self._settings = settings
        self._source = source
        self._distance = distance
        self.hardware = hardware

    @cached_property
    def _loaded(self) -> LoadedModel:
        if self._given is not None:
            return self._given
        with progress() as display:
            task = display.add_task(f"loading {self._source.name}", total=None)
            return load_model(
                self._source,
                self.device,
                choose_dtype(self._settings.dtype.text, self._source.config),
                lambda done, total: display.update(task, completed=done, total=total),
            )

    def open(
        self,
        policy: str,
        cache: ExpertBudget,
        *,
        executor: ExecutorChoice = ExecutorChoice.HOST,
        library: ExpertMapLibrary | None = None,
        future: RoutingTrace | None = None,
        trace: TraceWriter | None = None,
    ) -> Engine:
        """An engine; see ``Engine.open`` for the errors."""
        release_memory(self.device)
        return Engine.open(
            self._source,
            cache=cache,
            device=self._settings.device.text,
            dtype=self._settings.dtype.text,
            library=library,
            policy=policy,
            distance=self._distance,
            history=self.history,
            future=future,
            trace=trace,
            adaptive=self._adaptive(cache, executor) if policy == ADAPTIVE else None,
            loaded=self._loaded,
            executor=executor,
            prefill_chunk=self._settings.prefill_chunk_tokens,
        )

    def record(
        self,
        origin: str,
        cache: ExpertBudget,
        answer: Callable[[Engine], None],
        library: ExpertMapLibrary | None = None,
        policies: Sequence[str] = (),
    ) -> RoutingTrace:
        """The routing of what ``answer`` has an engine generate, with all that the ``policies`` can be taught by."""
        manifest = self._manifest(origin, gate_inputs=ADAPTIVE in policies and self._has_linear_gates())
        with tempfile.TemporaryDirectory(prefix="finemoe-bench-") as folder:
            path = Path(folder) / "routing.parquet"
            with (
                TraceWriter(path, manifest) as writer,
                self.open(RECORDED, cache, library=library, trace=writer) as engine,
            ):
                answer(engine)
            return read_trace(path)

    @cached_property
    def _fit(self) -> AdaptiveFit | None:
        return None if self.history is None else AdaptiveFit(self.history)

    def _adaptive(self, cache: ExpertBudget, executor: ExecutorChoice) -> AdaptivePlan | None:
        """Fitted once; its settings are chosen for the budget where the machine's times are known."""
        if self._fit is None:
            return None
        host = self._loaded.experts
        experts = host.layers * host.experts
        budget = cache.resolve(experts * slot_bytes(host.expert_bytes), free_bytes(self.device))
        slots = slots_within(budget, host.expert_bytes, experts, self._source.fingerprint.top_k)
        in_place = drives_itself(executor, self.device)
        return self._fit.plan(self.hardware, slots, in_place)

    def _has_linear_gates(self) -> bool:
        try:
            find_gates(self._loaded.layers)
        except UnsupportedModelError as error:
            note(f"{ADAPTIVE} does without what gates read: {error}")
            return False
        return True

    def _manifest(self, origin: str, gate_inputs: bool) -> TraceManifest:
        return TraceManifest.of_recording(self._source.name, self._source.fingerprint, origin, gate_inputs)

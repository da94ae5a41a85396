"""The part of ``finemoe profile`` that runs the model: measure, record, and answer again for comparison."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from engine.errors import TraceError, UnsupportedModelError
from finemoe_cli.console import note
from finemoe_cli.opening import describe_budget, open_engine
from finemoe_cli.settings import Settings
from finemoe_cli.warming import iterate_prompts

if TYPE_CHECKING:
    import torch

    from engine.engine import Engine
    from engine.hardware import Hardware
    from engine.measuring import LayerMeasure, LinkMeasure
    from engine.profiles import MachineIdentity
    from engine.prompts import PromptSet
    from engine.source import ModelSource
    from engine.steps import Step
    from engine.traces import RoutingTrace, TraceManifest

_TIMING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RecordingBounds:
    """How much is recorded: tokens of an answer, and seconds for all of them; what is there by then is used."""

    new_tokens: int
    seconds: float

    @property
    def timing_seconds(self) -> float:
        """For each of the timings that follow."""
        return min(_TIMING_SECONDS, self.seconds)


@dataclass(frozen=True, slots=True)
class Measures:
    """What was measured of the model on this machine; rates in bytes/s.

    Attributes:
        hardware: link and layer in the terms of a replay.
        miss_seconds: what a decode step waited for one missed expert, the engine's own work included; None without one.
        loading_seconds: for the dense part and all experts.
    """

    machine: MachineIdentity
    hardware: Hardware
    link: LinkMeasure
    miss_seconds: float | None
    layer: LayerMeasure
    host_read_rate: float
    checkpoint_read_rate: float
    loading_seconds: float


@dataclass(frozen=True, slots=True)
class Repetition:
    """One prompt answered again, unrecorded; times in seconds.

    Attributes:
        prompt_tokens: of its prefill.
        prefill_computing: time of the prefill without waiting for experts.
        decode: time of each decode step.
        stalls: of each, waiting for experts.
    """

    prompt_tokens: int
    prefill_computing: float
    decode: tuple[float, ...]
    stalls: tuple[float, ...]

    @classmethod
    def of(cls, prompt_tokens: int, steps: Sequence[Step]) -> Repetition:
        first, *decode = steps
        return cls(
            prompt_tokens,
            first.seconds - first.traffic.stall_seconds,
            tuple(step.seconds for step in decode),
            tuple(step.traffic.stall_seconds for step in decode),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ProfileRun:
    """What running the model has shown.

    Attributes:
        device, dtype: where and in what precision it ran.
        budget_bytes, slots: the expert budget, and how many experts it holds.
        trace: routing of the prompts, answered in order behind an LRU cache that was cold at first.
        again: the first requests answered once more behind the same cache.
    """

    measures: Measures
    device: torch.device
    dtype: torch.dtype
    budget_bytes: int
    slots: int
    trace: RoutingTrace
    again: tuple[Repetition, ...]


def run_model(settings: Settings, source: ModelSource, prompts: PromptSet, bounds: RecordingBounds) -> ProfileRun:
    """Open the model, measure and record.

    Raises:
        TraceError: the prompts gave fewer than two requests.
    """
    from engine.machine import identify_machine
    from engine.measuring import measure_checkpoint_read, measure_host_read, measure_layer, measure_link
    from engine.trace_files import read_trace

    checkpoint = measure_checkpoint_read(source)
    with TemporaryDirectory(prefix="finemoe-") as folder:
        with ExitStack() as stack:
            began = time.perf_counter()
            engine, file = _open(stack, settings, source, prompts, Path(folder))
            loading = time.perf_counter() - began
            note(describe_budget(engine, settings.cache.text))
            note("measuring the link and the host")
            link, host = measure_link(engine.host, engine.device), measure_host_read(engine.host)
            answers = _Answers(engine, bounds)
            note(f"recording the routing of {prompts.name} prompts, for {bounds.seconds:.0f} s at most")
            miss_seconds = answers.record(prompts)
            note("timing decode steps: with all experts resident, and once more as recorded")
            layer = measure_layer(engine, bounds.timing_seconds)
            again = answers.repeat()
            measures = Measures(
                machine=identify_machine(engine.device, engine.dtype),
                hardware=_hardware(engine, link, miss_seconds, layer, again),
                link=link,
                miss_seconds=miss_seconds,
                layer=layer,
                host_read_rate=host,
                checkpoint_read_rate=checkpoint,
                loading_seconds=loading,
            )
            found = (measures, engine.device, engine.dtype, engine.budget_bytes, engine.slots)
        return ProfileRun(*found, trace=read_trace(file), again=again)


def _open(
    stack: ExitStack, settings: Settings, source: ModelSource, prompts: PromptSet, folder: Path
) -> tuple[Engine, Path]:
    """The engine behind an LRU cache and the file its routing goes to, with gate inputs if the model allows."""
    from engine.trace_files import TraceWriter

    for gate_inputs in (True, False):
        file = folder / f"routing-{gate_inputs}.parquet"
        writer = stack.enter_context(TraceWriter(file, _manifest(source, prompts, gate_inputs)))
        try:
            return stack.enter_context(open_engine(settings, source, None, writer)), file
        except UnsupportedModelError as error:
            if not gate_inputs:
                raise
            note(f"policies that apply later gates to earlier inputs are left out: {error}")
    raise AssertionError("both openings have returned or raised")


def _manifest(source: ModelSource, prompts: PromptSet, gate_inputs: bool) -> TraceManifest:
    from engine.traces import TraceManifest

    origin = f"profiled with {prompts.name} {prompts.identity}"
    return TraceManifest.of_recording(source.name, source.fingerprint, origin, gate_inputs)


def _hardware(
    engine: Engine,
    link: LinkMeasure,
    miss_seconds: float | None,
    layer: LayerMeasure,
    repeated: Sequence[Repetition],
) -> Hardware:
    """What was measured in the terms of a replay; what a miss takes beyond the bare link counts as latency."""
    from engine.hardware import Hardware
    from engine.links import CHUNK_BYTES

    latency = link.latency_seconds
    if miss_seconds is not None:
        latency = max(latency, miss_seconds - engine.expert_bytes / link.bandwidth)
    layers = len(engine.layers)
    further = [
        (r.prefill_computing / layers - layer.layer_seconds) / (r.prompt_tokens - 1)
        for r in repeated
        if r.prompt_tokens > 1
    ]
    return Hardware(
        expert_bytes=engine.expert_bytes,
        bandwidth=link.bandwidth,
        latency=latency,
        layer_seconds=layer.layer_seconds,
        chunk_bytes=CHUNK_BYTES,
        token_seconds=max(median(further), 0.0) if further else 0.0,
    )


class _Answers:
    """Answers prompts greedily, one after the other, and the first of them a second time."""

    def __init__(self, engine: Engine, bounds: RecordingBounds) -> None:
        self._engine = engine
        self._bounds = bounds
        self._whole: list[list[int]] = []

    def record(self, prompts: PromptSet) -> float | None:
        """Answer until the prompts or the time end; the last answer may be cut short.

        Returns:
            the median, over decode steps that missed experts, of the seconds they waited for each; None without any.

        Raises:
            TraceError: there are fewer than two prompts.
        """
        began = time.perf_counter()
        waits: list[float] = []
        for number, prompt in enumerate(iterate_prompts(prompts)):
            tokens = self._shorten(self._engine.encode_chat(prompt.messages))
            for step in self._steps(tokens, number):
                if step.phase == "decode" and step.traffic.misses:
                    waits.append(step.traffic.stall_seconds / step.traffic.misses)
                # Two requests are the least that can be told apart into store and test.
                if len(self._whole) > 1 and time.perf_counter() - began > self._bounds.seconds:
                    return median(waits) if waits else None
            self._whole.append(tokens)
        if len(self._whole) < 2:
            raise TraceError(
                f"{prompts.name} has fewer than two prompts, but a profile learns from some and tests on others: "
                "give two at least"
            )
        return median(waits) if waits else None

    def repeat(self) -> tuple[Repetition, ...]:
        """Answer the first prompts again without a recorder."""
        began = time.perf_counter()
        repeated: list[Repetition] = []
        with self._engine.unobserved():
            for tokens in self._whole:
                repeated.append(Repetition.of(len(tokens), list(self._steps(tokens, None))))
                if time.perf_counter() - began > self._bounds.timing_seconds:
                    break
        return tuple(repeated)

    def _steps(self, tokens: list[int], number: int | None) -> Generator[Step, None, None]:
        from engine.steps import GenerationSettings

        return self._engine.generate([tokens], GenerationSettings(self._bounds.new_tokens), first_sequence=number)

    def _shorten(self, tokens: list[int]) -> list[int]:
        """The end of a prompt that leaves room for its answer."""
        length = self._engine.context_length
        return tokens if length is None else tokens[-max(length - self._bounds.new_tokens, 1) :]

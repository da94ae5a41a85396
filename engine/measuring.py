"""Measuring what a replay must know: the link, the computation of a layer, and the host's reads. Medians throughout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import torch

from engine.engine import Engine
from engine.expert_arithmetic import apply_expert
from engine.families import MoELayer
from engine.host_experts import HostExperts
from engine.links import open_link
from engine.slots import DeviceSlots
from engine.source import ModelSource
from engine.steps import GenerationSettings, Step

_SMALLEST_COPY = 4 << 10
_SLOTS_BYTES = 64 << 20
_REPEATS = 25
_SECONDS_A_SIZE = 0.5
_READ_BYTES = 256 << 20
_READ_PIECE = 16 << 20
_STEPS = 60
_LEAST_ROUNDS = 4
_LONGEST_ROUND = 32


@dataclass(frozen=True, slots=True)
class CopySample:
    """Copies of one size from the host's buffers into device slots: how many, and their median time."""

    bytes: int
    seconds: float
    copies: int


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """The link through the engine's own ``Link``.

    Attributes:
        latency_seconds: time of the smallest copy, which is nearly all latency.
        bandwidth: bytes/s at which a copy of an expert's size goes on beyond it.
        samples: by rising size, the last of them a whole expert.
    """

    latency_seconds: float
    bandwidth: float
    samples: tuple[CopySample, ...]

    @classmethod
    def of(cls, samples: Sequence[CopySample]) -> LinkMeasure:
        """The line through the smallest copy and the one of a whole expert, which a replay needs exactly."""
        first, last = samples[0], samples[-1]
        seconds, size = last.seconds - first.seconds, last.bytes - first.bytes
        if size > 0 and seconds > 0:
            return cls(first.seconds, size / seconds, tuple(samples))
        return cls(0.0, last.bytes / last.seconds, tuple(samples))


@dataclass(frozen=True, slots=True)
class LayerMeasure:
    """Computing a decode step of one sequence.

    Attributes:
        layer_seconds: c, a step with every expert resident, divided by the L MoE layers; so it holds a share of the
            dense layers, the embeddings and the choice of the token.
        experts_seconds: of it, inside the experts' function.
        attention_seconds: of it, the rest: attention, gate and what lies outside the layers.
        expert_seconds: the product of one expert with one token.
        steps: decode steps timed.
        stall_subtracted: the budget does not hold the experts of one token, so waiting was subtracted from each step.
    """

    layer_seconds: float
    experts_seconds: float
    attention_seconds: float
    expert_seconds: float
    steps: int
    stall_subtracted: bool


def measure_link(host: HostExperts, device: torch.device) -> LinkMeasure:
    """Copy parts of experts, by powers of four, and whole experts; from and to other places each time."""
    whole = host.layout(0).nbytes
    slots = DeviceSlots(host, max(1, min(_SLOTS_BYTES // host.expert_bytes, host.layers * host.experts)), device)
    link = open_link(host, slots, device)
    for slot in range(slots.count):
        # The first write to a page costs more than any later one.
        link.load_part(0, slot % host.experts, slot, 0, whole)
    sizes = [_SMALLEST_COPY]
    while sizes[-1] * 4 < whole:
        sizes.append(sizes[-1] * 4)
    numbers = count()

    def copy(size: int) -> None:
        number = next(numbers)
        expert, slot = number % host.experts, number % slots.count
        if size < whole:
            link.load_part(0, expert, slot, 0, size)
        else:
            link.load(0, expert, slot)
            link.use(slot)

    samples = []
    for size in [*(s for s in sizes if s < whole), whole]:
        times = _time(lambda size=size: copy(size), device)  # type: ignore[misc]
        samples.append(CopySample(size, median(times), len(times)))
    link.take_stall_seconds()
    return LinkMeasure.of(samples)


def measure_layer(engine: Engine, seconds: float) -> LayerMeasure:
    """Time decode steps whose experts are all resident, and then the part of them inside the experts' functions.

    One token is continued again and again for as many steps as the budget holds experts for; the first round
    brings them in. Either timing ends after enough steps, or so many seconds.
    """
    layers = engine.layers
    per_step = len(layers) * layers[0].top_k
    length = min(_LONGEST_ROUND, engine.slots // per_step)
    with engine.unobserved():
        plain = _resident_steps(engine, length, seconds)
        clock = _ExpertsClock(engine.device)
        with clock.watching(layers):
            _resident_steps(engine, length, seconds, clock)
    step_seconds = median(step.seconds - (step.traffic.stall_seconds if length < 1 else 0.0) for step in plain)
    # A share of the very steps it was timed in: a machine may be slower now than it was for the others.
    inside = step_seconds * median(clock.shares)
    return LayerMeasure(
        layer_seconds=step_seconds / len(layers),
        experts_seconds=inside / len(layers),
        attention_seconds=(step_seconds - inside) / len(layers),
        expert_seconds=_time_expert(engine),
        steps=len(plain),
        stall_subtracted=length < 1,
    )


def measure_host_read(host: HostExperts) -> float:
    """Bytes/s at which all threads read experts in host memory."""
    buffers: list[torch.Tensor] = []
    for number in range(host.layers * host.experts):
        buffers.append(host.buffer(*divmod(number, host.experts)))
        if sum(buffer.numel() for buffer in buffers) >= _READ_BYTES:
            break
    words = [buffer[: buffer.numel() // 8 * 8].view(torch.int64) for buffer in buffers]

    def read() -> None:
        for word in words:
            word.sum()

    return sum(word.nbytes for word in words) / median(_time(read, torch.device("cpu")))


def measure_checkpoint_read(source: ModelSource) -> float:
    """Bytes/s at which the checkpoint's files are read, its beginning at most; from the disk where the system can
    be asked to forget what it has cached of them."""
    piece = bytearray(_READ_PIECE)
    read = 0
    start = time.perf_counter()
    for file in source.shards:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            with suppress(AttributeError, OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            while read < _READ_BYTES and (got := os.readv(descriptor, [piece])):
                read += got
        finally:
            os.close(descriptor)
    return read / (time.perf_counter() - start)


@dataclass
class _ExpertsClock:
    """The share of each step that is spent inside experts' functions."""

    device: torch.device
    shares: list[float] = field(default_factory=list)
    _marks: list[Any] = field(default_factory=list)

    @contextmanager
    def watching(self, layers: Sequence[MoELayer]) -> Iterator[None]:
        handles = []
        for layer in layers:
            handles.append(layer.experts.register_forward_pre_hook(self._mark))
            handles.append(layer.experts.register_forward_hook(self._mark))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mark(self, *_: Any) -> None:
        self._marks.append(_now(self.device))

    def end_step(self, step: Step, counted: bool) -> None:
        """Add up the step that has just ended, if it counts; the device is idle."""
        marks, self._marks = self._marks, []
        if counted:
            inside = sum(map(_between, marks[::2], marks[1::2])) - step.traffic.stall_seconds
            self.shares.append(min(max(inside / (step.seconds - step.traffic.stall_seconds), 0.0), 1.0))


def _resident_steps(engine: Engine, length: int, seconds: float, clock: _ExpertsClock | None = None) -> list[Step]:
    """Steps without a load; with ``length`` 0 any steps. A step of one token is computed alike in both phases."""
    token = engine.encode_text("a")[-1:]
    settings = GenerationSettings(max_new_tokens=max(length, 1), ignore_eos=True)
    found: list[Step] = []
    every: list[Step] = []
    began = time.perf_counter()
    for rounds in count():
        if len(found) >= _STEPS or (rounds >= _LEAST_ROUNDS and time.perf_counter() - began > seconds):
            break
        for step in engine.generate([token], settings):
            loaded = step.traffic.misses + step.traffic.late > 0
            counted = rounds > 0 and not (loaded and length > 0) and (step.iteration > 0 or length < 2)
            if clock is not None:
                clock.end_step(step, counted or rounds == 0)
            every.append(step)
            if counted:
                found.append(step)
    # A model whose routing differs from round to round may never have a step without a load.
    return found or every


def _time_expert(engine: Engine) -> float:
    layer, host = engine.layers[0], engine.host
    tensors = host.layout(0).views(host.buffer(0, 0).to(engine.device))
    hidden = torch.ones(1, engine.fingerprint.hidden_size, dtype=engine.dtype, device=engine.device)

    def compute() -> None:
        with torch.inference_mode():
            apply_expert(layer.experts, tensors, hidden)

    return median(_time(compute, engine.device))


def _time(work: Callable[[], None], device: torch.device) -> list[float]:
    """Times of one piece of work repeated, after one that is not counted."""
    work()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < _REPEATS and time.perf_counter() - began < _SECONDS_A_SIZE):
        start = _now(device)
        work()
        stop = _now(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(_between(start, stop))
    return times


def _now(device: torch.device) -> Any:
    """A mark in time: on the device's own clock where it runs behind the host."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(start: Any, stop: Any) -> float:
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3

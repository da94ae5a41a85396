"""Replaying a trace against a policy and a time model, event by event (DESIGN section 4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.errors import BudgetError
from engine.hardware import Hardware
from engine.link_clock import LinkClock
from engine.policies import PreparedPolicy
from engine.prefill_stream import PrefillStream, open_stream
from engine.residents import Residents
from engine.traces import RoutingTrace, TracedRequest
from engine.transfer_queue import TransferQueue

WARM_UP_ITERATIONS = 200


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Totals of one phase after the warm-up; shares are of routed experts.

    Attributes:
        iterations: prefills or decode steps.
        routed: experts that gates chose.
        hit, late, miss: shares of them that were resident, under way, or neither when the gate had decided.
        bytes_moved: over the link, of copies that arrived and of experts read in place.
        wasted_bytes: of prefetched experts evicted before any use.
        stall_seconds: the device waited for the link.
        seconds: in all.
        prefill: the same for the prefills of the trace, whose mean time is the TTFT; None where there are none.
    """

    iterations: int
    routed: int
    hit: float
    late: float
    miss: float
    bytes_moved: int
    wasted_bytes: int
    stall_seconds: float
    seconds: float
    prefill: ReplayOutcome | None = None

    @property
    def tpot_seconds(self) -> float:
        """Mean time of an iteration."""
        return self.seconds / self.iterations


class Replay:
    """One device, one link, one layer after the other.

    A layer is attention (c/2), its gate's decision, a wait until its routed experts are resident, and their products
    (c/2). Prefetches move while the device computes and stop, at the end of a piece, for loads that a gate has decided.
    Predictions take no time. An iteration of many tokens streams instead (``PrefillStream``): experts are computed one
    after the other as they arrive, while the link goes on with what comes next.

    Args:
        capacity: experts the device has room for.
        in_place: a routed expert that is not resident is read over the link where it lies, while copies take half of
            the link; copies of missed experts follow behind. Otherwise the layer waits for its copy.

    Raises:
        BudgetError: room for fewer than K experts.
    """

    def __init__(
        self, trace: RoutingTrace, policy: PreparedPolicy, hardware: Hardware, capacity: int, in_place: bool
    ) -> None:
        manifest = trace.manifest
        partitions = manifest.layers if policy.per_layer else 1
        if capacity // partitions < manifest.top_k:
            where = " a layer" if policy.per_layer else ""
            raise BudgetError(
                f"room for {capacity // partitions} experts{where}, but one token needs {manifest.top_k}: "
                "give a larger cache"
            )
        self._trace = trace
        self._policy = policy
        self._rule = policy.rule
        self._hardware = hardware
        self._in_place = in_place
        self._residents = Residents(policy.rule, manifest.experts, capacity, partitions)
        self._queue = TransferQueue()
        self._clock = LinkClock(hardware, self._start_next, self._arrive)
        self._fills: deque[int] = deque()
        self._stream = open_stream(
            policy.rule, manifest.layers, manifest.experts, manifest.top_k, self._residents.capacity
        )
        self._streaming = False
        self._position = -1
        self._pinned: Collection[int] = ()
        self._hits = self._late = self._misses = 0
        self._computed = 0.0

    def run(self, warm_up: int = WARM_UP_ITERATIONS) -> ReplayOutcome:
        """Replay the whole trace; the first ``warm_up`` iterations are not counted.

        Returns:
            what the decode steps found; the prefills' where the trace has nothing else.

        Raises:
            RuntimeError: bytes or room do not add up, which would be a fault of the replay.
        """
        experts = self._trace.manifest.experts
        warm_up = warm_up if warm_up < self._trace.iterations else 0
        done = 0
        counted = {"prefill": 0, "decode": 0}
        totals = {phase: np.zeros(7) for phase in counted}
        for request in self._trace.requests:
            self._policy.begin_request(request, self._position + 1)
            tokens = request.tokens.tolist()
            for iteration, layers in enumerate(request.keys(experts)):
                before = self._totals()
                half = self._hardware.layer_time(tokens[iteration]) / 2
                if self._stream is not None and self._stream.begin(tokens[iteration], self._residents.keys):
                    self._stream_through(self._stream, request, iteration, layers, half)
                else:
                    self._step(iteration, layers, half)
                if done >= warm_up:
                    phase = request.phases[iteration]
                    totals[phase] += self._totals() - before
                    counted[phase] += 1
                done += 1
        self._clock.check()
        outcomes = {phase: _outcome(counted[phase], totals[phase]) for phase in counted if counted[phase]}
        prefill = outcomes.get("prefill")
        return replace(outcomes["decode"], prefill=prefill) if "decode" in outcomes else outcomes["prefill"]

    def _step(self, iteration: int, layers: Sequence[Sequence[int]], half: float) -> None:
        policy, queue, compute = self._policy, self._queue, self._clock.compute
        queue.offer(policy.begin_iteration(iteration))
        for layer, keys in enumerate(layers):
            compute(half)
            self._position += 1
            self._rule.record_use(keys)
            queue.offer(policy.observe(iteration, layer))
            self._serve(keys)
            compute(half)
            # Only now nothing reads the layer's experts.
            self._pinned = ()
        self._computed += 2 * half * len(layers)

    def _stream_through(
        self,
        stream: PrefillStream,
        request: TracedRequest,
        iteration: int,
        layers: Sequence[Sequence[int]],
        half: float,
    ) -> None:
        policy, residents = self._policy, self._residents
        self._queue.drop_prefetches()
        self._streaming, residents.rule = True, stream
        policy.begin_iteration(iteration)
        for layer, keys in enumerate(layers):
            self._clock.compute(half)
            self._position += 1
            self._rule.record_use(keys)
            policy.observe(iteration, layer)
            counts = request.routed_counts(iteration, layer).tolist()
            self._serve_stream(stream, dict(zip(keys, counts, strict=True)), half / len(keys))
        self._streaming, residents.rule = False, self._rule
        stream.abandon()
        self._computed += 2 * half * len(layers)

    def _serve_stream(self, stream: PrefillStream, counts: Mapping[int, int], share: float) -> None:
        """Compute the resident experts, then the others in the order of their arrival, for ``share`` seconds each."""
        residents, clock = self._residents, self._clock
        keys = list(counts)
        absent = [key for key in keys if not residents.holds(key)]
        late = [key for key in keys if key == residents.loading]
        resident = [key for key in keys if residents.holds(key) and key != residents.loading]
        self._hits += len(resident)
        self._late += len(late)
        self._misses += len(absent)
        residents.touch([key for key in keys if residents.holds(key)])
        stream.decide(counts, absent)
        pinned = self._pinned = set(keys)
        for key in [*resident, *late, *absent]:
            stream.awaited = key
            while not residents.holds(key) or residents.loading == key:
                clock.wait_for_next()
            stream.awaited = None
            clock.compute(share)
            pinned.remove(key)

    def _serve(self, keys: Sequence[int]) -> None:
        """The gate has decided: count, and bring what is absent."""
        residents = self._residents
        self._pinned = keys
        held = residents.partition(keys[0])
        absent = [key for key in keys if key not in held]
        loading = residents.loading
        if not absent and (loading is None or loading not in keys):
            self._hits += len(keys)
            residents.touch(keys)
            return
        late = loading is not None and loading in keys
        self._misses += len(absent)
        self._late += late
        self._hits += len(keys) - len(absent) - late
        residents.touch([key for key in keys if key in held])
        for key in absent:
            self._queue.withdraw(key)
        if self._in_place:
            self._clock.read_in_place(len(absent) + late)
            self._fills.extend(absent)
        else:
            # A prefetch in the only slot has to end before anything can take its place.
            if late or (loading is not None and residents.capacity == 1):
                self._clock.wait_for_arrival()
            else:
                self._clock.wait_for_piece()
            self._pinned = residents.admit(absent, keys)
            self._clock.load(len(absent))

    def _start_next(self) -> bool:
        """Start the copy the free link is best used for."""
        residents = self._residents
        if self._streaming:
            return self._start_streamed()
        while self._fills:
            key = self._fills.popleft()
            value = float(self._rule.values(np.array([key]))[0])
            if not residents.holds(key) and residents.admit_speculatively(key, value, self._pinned):
                return self._start(key)
        while self._queue.has_prefetches:
            prefetch = self._queue.next_prefetch(self._position, self._is_absent)
            if prefetch is None:
                return False
            value = self._rule.speculative_value(prefetch.key, prefetch.probability)
            if residents.admit_speculatively(prefetch.key, value, self._pinned):
                return self._start(prefetch.key)
        return False

    def _start_streamed(self) -> bool:
        assert self._stream is not None
        load = self._stream.next_load(self._residents.holds)
        if load is None or not self._residents.admit_speculatively(load.key, load.worth, self._pinned, load.decided):
            return False
        return self._start(load.key)

    def _start(self, key: int) -> bool:
        self._residents.loading = key
        self._clock.start()
        return True

    def _arrive(self) -> None:
        self._residents.loading = None

    def _is_absent(self, key: int) -> bool:
        return not self._residents.holds(key)

    def _totals(self) -> np.ndarray:
        clock = self._clock
        wasted = self._residents.wasted * self._hardware.expert_bytes
        return np.array(
            [self._hits, self._late, self._misses, clock.bytes_moved, wasted, clock.stall, self._computed + clock.stall]
        )


def _outcome(iterations: int, totals: np.ndarray) -> ReplayOutcome:
    hits, late, misses, moved, wasted, stall, seconds = totals.tolist()
    routed = hits + late + misses
    return ReplayOutcome(
        iterations=iterations,
        routed=int(routed),
        hit=hits / max(routed, 1),
        late=late / max(routed, 1),
        miss=misses / max(routed, 1),
        bytes_moved=round(moved),
        wasted_bytes=round(wasted),
        stall_seconds=stall,
        seconds=seconds,
    )

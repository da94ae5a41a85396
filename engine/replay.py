"""Replaying a trace against a policy and a time model, event by event (DESIGN section 4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import BudgetError
from engine.hardware import Hardware
from engine.policies import Policy
from engine.residents import Residents
from engine.traces import RoutingTrace
from engine.transfer_queue import TransferQueue

WARM_UP_ITERATIONS = 200


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Totals of the iterations after the warm-up; shares are of routed experts.

    Attributes:
        iterations: decode steps and prefills replayed.
        routed: experts that gates chose.
        hit, late, miss: shares of them that were resident, under way, or neither when the gate had decided.
        bytes_moved: over the link, copies under way at the end in part.
        wasted_bytes: of prefetched experts evicted before any use.
        stall_seconds: the device waited for the link.
        seconds: in all.
    """

    iterations: int
    routed: int
    hit: float
    late: float
    miss: float
    bytes_moved: float
    wasted_bytes: int
    stall_seconds: float
    seconds: float

    @property
    def tpot_seconds(self) -> float:
        """Mean time of an iteration."""
        return self.seconds / self.iterations


class Replay:
    """One device, one link, one layer after the other.

    A layer is attention (c/2), its gate's decision, a wait until its routed experts are resident, and their products
    (c/2). Prefetches move while the device computes and stop, at the end of a piece, for loads that a gate has decided.
    Predictions take no time.

    Args:
        capacity: experts the device has room for.
        in_place: a routed expert that is not resident is read over the link where it lies, while copies take half of
            the link; copies of missed experts follow behind. Otherwise the layer waits for its copy.

    Raises:
        BudgetError: room for fewer than K experts.
    """

    def __init__(self, trace: RoutingTrace, policy: Policy, hardware: Hardware, capacity: int, in_place: bool) -> None:
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
        self._fills: deque[int] = deque()
        self._remaining = 0.0
        self._position = -1
        self._pinned: Sequence[int] = ()
        self._copy = hardware.copy_seconds
        self._read = hardware.expert_bytes / hardware.bandwidth
        self._hits = self._late = self._misses = 0
        self._copies = self._reads = 0
        self._stall = self._busy = 0.0

    def run(self, warm_up: int = WARM_UP_ITERATIONS) -> ReplayOutcome:
        """Replay the whole trace; the first ``warm_up`` iterations are not counted.

        Raises:
            RuntimeError: bytes or room do not add up, which would be a fault of the replay.
        """
        manifest = self._trace.manifest
        total = self._trace.iterations
        warm_up = warm_up if warm_up < total else 0
        done = 0
        before = self._totals()
        half = self._hardware.layer_seconds / 2
        policy, queue = self._policy, self._queue
        for request in self._trace.requests:
            policy.begin_request(request, self._position + 1)
            for iteration, layers in enumerate(request.keys(manifest.experts)):
                if done == warm_up:
                    before = self._totals()
                queue.offer(policy.begin_iteration(iteration))
                for layer, keys in enumerate(layers):
                    self._compute(half)
                    self._position += 1
                    self._rule.record_use(keys)
                    queue.offer(policy.observe(iteration, layer))
                    self._serve(keys)
                    self._compute(half)
                done += 1
        self._check_bytes()
        return self._outcome(total - warm_up, before)

    def _serve(self, keys: Sequence[int]) -> None:
        """The gate has decided: count, and bring what is absent."""
        residents = self._residents
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
        self._pinned = keys
        if self._in_place:
            self._read_in_place(absent, late)
        else:
            self._wait_for(absent, late)
        self._pinned = ()

    def _wait_for(self, absent: Sequence[int], late: bool) -> None:
        stall = 0.0
        if late:
            stall = self._remaining
            self._move(self._remaining)
        elif self._residents.loading is not None and self._hardware.chunk_bytes:
            # A piece that has begun ends before anything else moves.
            stall = self._remaining % self._hardware.chunk_seconds
            self._move(stall)
        self._residents.admit(absent, self._pinned)
        self._copies += len(absent)
        self._busy += len(absent) * self._copy
        self._stall += stall + len(absent) * self._copy

    def _read_in_place(self, absent: Sequence[int], late: bool) -> None:
        left = (len(absent) + late) * self._read
        self._reads += len(absent) + late
        self._busy += left
        while left > 0 and self._copying():
            step = min(left, self._remaining)
            self._move(step)
            left -= step
            self._stall += 2 * step
        self._stall += left
        self._fills.extend(absent)

    def _compute(self, seconds: float) -> None:
        """The device computes; whatever is to be copied moves meanwhile."""
        while seconds > 0 and self._copying():
            step = min(seconds, self._remaining)
            self._move(step)
            seconds -= step

    def _move(self, seconds: float) -> None:
        self._busy += seconds
        self._remaining -= seconds
        if self._remaining <= 1e-12:
            self._remaining = 0.0
            self._residents.loading = None

    def _copying(self) -> bool:
        """Whether a copy is under way, after starting the next one if the link is free."""
        residents = self._residents
        if residents.loading is not None:
            return True
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

    def _start(self, key: int) -> bool:
        self._residents.loading = key
        self._remaining = self._copy
        self._copies += 1
        return True

    def _is_absent(self, key: int) -> bool:
        return not self._residents.holds(key)

    def _totals(self) -> np.ndarray:
        moved = self._bytes_moved()
        return np.array([self._hits, self._late, self._misses, moved, self._residents.wasted, self._stall])

    def _bytes_moved(self) -> float:
        partly = self._remaining / self._copy if self._copy else 0.0
        return (self._copies + self._reads - partly) * self._hardware.expert_bytes

    def _check_bytes(self) -> None:
        expected = self._copies * self._copy + self._reads * self._read - self._remaining
        if abs(self._busy - expected) > 1e-6 * max(expected, 1.0):
            raise RuntimeError(f"the link was busy for {self._busy} s, but its transfers take {expected} s")

    def _outcome(self, iterations: int, before: np.ndarray) -> ReplayOutcome:
        hits, late, misses, moved, wasted, stall = (self._totals() - before).tolist()
        routed = hits + late + misses
        computing = iterations * self._trace.manifest.layers * self._hardware.layer_seconds
        return ReplayOutcome(
            iterations=iterations,
            routed=int(routed),
            hit=hits / routed,
            late=late / routed,
            miss=misses / routed,
            bytes_moved=moved,
            wasted_bytes=int(wasted) * self._hardware.expert_bytes,
            stall_seconds=stall,
            seconds=computing + stall,
        )

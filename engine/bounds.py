"""The bounds that no policy can beat: they know what will be routed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.eviction import EvictionRule
from engine.observations import ObservedGate, ObservedIteration
from engine.policies import NOT_SEARCHED, Offers
from engine.traces import RoutingTrace, TracedRequest
from engine.transfer_queue import Prefetch

_NEVER = 1e15


class NextUse:
    """Belady's rule: evict what is used furthest in the future. It knows the trace and is a bound, not a policy.

    The requests of the trace are expected one after the other, each by itself. Ties are impossible but among experts
    never used again.
    """

    def __init__(self, trace: RoutingTrace) -> None:
        experts = trace.manifest.experts
        positions = [keys for request in trace.requests for layers in request.keys(experts) for keys in layers]
        self._next = np.full(trace.manifest.keys, _NEVER)
        self._following: list[list[float]] = [[]] * len(positions)
        upcoming = [_NEVER] * trace.manifest.keys
        for position in range(len(positions) - 1, -1, -1):
            self._following[position] = [upcoming[key] for key in positions[position]]
            for key in positions[position]:
                upcoming[key] = position
        self._next[:] = upcoming
        self._position = 0

    def record_use(self, keys: Sequence[int]) -> None:
        self._next[list(keys)] = self._following[self._position]
        self._position += 1

    def record_guidance(self, probabilities: np.ndarray) -> None:
        """The future needs no guidance."""

    def record_load(self, key: int) -> None:
        """The future does not depend on it."""

    def record_eviction(self, key: int) -> None:
        """The future does not depend on it."""

    def values(self, keys: np.ndarray) -> np.ndarray:
        return -self._next[keys]

    def speculative_value(self, key: int, probability: float) -> float:
        return -float(self._next[key])


class Perfect:
    """Prefetches the experts of the next L layers in the order of their use, and evicts by Belady's rule."""

    per_layer = False
    needs_gate_inputs = False
    library_scores = NOT_SEARCHED

    def __init__(self, trace: RoutingTrace) -> None:
        self.rule: EvictionRule = NextUse(trace)
        self._horizon = trace.manifest.layers
        self._position = 0
        every = [layer for request in trace.requests for it in request.keys(trace.manifest.experts) for layer in it]
        self._due = [[Prefetch(key, position, 1.0) for key in keys] for position, keys in enumerate(every)]

    def begin(self, iteration: ObservedIteration) -> Offers:
        return self.ahead(0)

    def observe(self, gate: ObservedGate) -> Offers:
        return self.ahead(1)

    def ahead(self, gates: int) -> Offers:
        """What the next layers use, after so many gates more have decided."""
        self._position += gates
        upcoming = self._due[self._position : self._position + self._horizon]
        return [prefetch for layer in upcoming for prefetch in layer]


class PreparedPerfect:
    """The same for replays."""

    per_layer = False

    def __init__(self, trace: RoutingTrace) -> None:
        self._policy = Perfect(trace)
        self.rule = self._policy.rule

    def begin_request(self, request: TracedRequest, position: int) -> None:
        """The next request follows as any iteration does."""

    def begin_iteration(self, iteration: int) -> Offers:
        return self._policy.ahead(0)

    def observe(self, iteration: int, layer: int) -> Offers:
        return self._policy.ahead(1)

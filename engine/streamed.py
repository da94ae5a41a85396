"""Replaying a policy in the form in which a live engine runs it."""

from __future__ import annotations

import numpy as np

from engine.observations import ObservedGate, ObservedIteration
from engine.policies import Offers, Policy
from engine.records import ExpertMapLibrary, IterationRecord
from engine.traces import TracedRequest


class Streamed:
    """A policy told event by event what a trace holds; slower than a prepared one, and just what an engine decides.

    Args:
        experts: J.
        library: given every iteration back, as an engine does; None where nothing is learnt.
    """

    def __init__(self, policy: Policy, experts: int, library: ExpertMapLibrary | None = None) -> None:
        self.rule = policy.rule
        self.per_layer = policy.per_layer
        self._policy = policy
        self._experts = experts
        self._library = library
        self._iterations = 0
        self._request: TracedRequest | None = None
        self._maps = self._uses = np.empty((0, 0, 0), dtype=np.float32)

    def begin_request(self, request: TracedRequest, position: int) -> None:
        self._request = request
        self._maps, self._uses = request.maps(self._experts), request.uses(self._experts)

    def begin_iteration(self, iteration: int) -> Offers:
        request = self._traced()
        embeddings = None if request.embeddings is None else request.embeddings[iteration : iteration + 1]
        number, self._iterations = self._iterations, self._iterations + 1
        return self._policy.begin(ObservedIteration(number, request.phases[iteration], (request.request,), embeddings))

    def observe(self, iteration: int, layer: int) -> Offers:
        request = self._traced()
        inputs = None
        if request.gate_inputs is not None and request.phases[iteration] == "decode":
            inputs = request.gate_inputs[iteration, layer : layer + 1].astype(np.float32)
        maps, uses = self._maps[iteration, layer], self._uses[iteration, layer]
        offers = self._policy.observe(ObservedGate(layer, maps[None], uses[None], inputs))
        if layer == request.layers - 1 and self._library is not None:
            self._publish(self._library, request, iteration)
        return offers

    def _publish(self, library: ExpertMapLibrary, request: TracedRequest, iteration: int) -> None:
        embedding = np.empty(0) if request.embeddings is None else request.embeddings[iteration]
        if not embedding.any():
            return
        record = IterationRecord(
            sequence=request.request,
            iteration=iteration,
            phase=request.phases[iteration],
            prompt_hash=str(request.request),
            tokens=int(request.tokens[iteration]),
            embedding=embedding,
            probabilities=self._maps[iteration],
        )
        library.publish([record], *self._policy.library_scores)

    def _traced(self) -> TracedRequest:
        if self._request is None:
            raise RuntimeError("a replay begins a request before its iterations")
        return self._request

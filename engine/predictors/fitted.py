"""Calibrated probabilities of use: everything a store teaches, mixed, for replays and live engines alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from engine.predictors.knowledge import Knowledge, Scan
from engine.predictors.mix import Mix
from engine.predictors.request_state import BLOCK, RequestState
from engine.traces import TracedRequest

DISCOUNTS = (0.4, 0.6, 0.75, 0.9)
"""Rates at which a use may lose worth with each iteration until it happens."""

HIDDEN = "+hidden"


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What is known of a request of T iterations, each of it from what was known at its moment.

    Attributes:
        upcoming: float32 [T + 1, L, J], probability of use in iteration t, before it.
        start: float32 [T, L, J], the same once its embedding is known.
        current: float32 [T, L, D, J]; once gate l has decided, of layer l + 1 + i of the same iteration.
        values: [T + 1, L, J], expected discounted next use before iteration t: 1 if it uses the expert, the discount if
            the next one does.
        left: [T, L, J], the same of layer l once gate l has decided, counted from iteration t + 1.
    """

    upcoming: np.ndarray
    start: np.ndarray
    current: np.ndarray
    values: np.ndarray
    left: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class FittedPredictors:
    """What was learnt, and the mixes of it.

    Attributes:
        mixes: by moment: ``next`` (probability of use in the next iteration), ``start``, ``ahead-D``, and
            ``value-GAMMA``, ``left-GAMMA`` (expected discounted use); with ``HIDDEN`` appended where gate inputs
            are among the features.
    """

    knowledge: Knowledge
    mixes: Mapping[str, Mix]

    @property
    def reads_gate_inputs(self) -> bool:
        return self.knowledge.maps is not None

    def forecast(self, request: TracedRequest, discount: float) -> Forecast:
        """Estimates for every iteration of a request."""
        knowledge = self.knowledge
        layers, experts = knowledge.popularity.shape
        count = len(request)
        upcoming = np.empty((count + 1, layers, experts), dtype=np.float32)
        values = np.empty_like(upcoming)
        upcoming[0] = knowledge.popularity
        values[0] = steady_value(knowledge.popularity, discount)
        start = np.empty((count, layers, experts), dtype=np.float32)
        left = np.empty_like(start)
        current = np.zeros((count, layers, knowledge.depth, experts), dtype=np.float32)
        state = RequestState(knowledge.popularity)
        for block in blocks(request, experts):
            rows = block.rows
            scan = Scan(knowledge, state, len(block.maps))
            for layer in range(layers):
                scan.fill(layer, block.maps[:, layer], block.uses[:, layer])
            scan.advance_to_end()
            inputs = block.inputs if self.reads_gate_inputs else None
            known = scan.following(None if inputs is None else inputs[:, -1])
            after = slice(rows.start + 1, rows.stop + 1)
            upcoming[after] = self._mix("next", inputs)(known)
            values[after] = self._mix(f"value-{discount:g}", inputs)(known)
            start[rows] = self._start(scan, upcoming[rows], block.embeddings)
            for layer in range(layers):
                read = None if inputs is None else inputs[:, layer]
                scan.advance(layer)
                left[rows, layer] = self._left(scan, layer, read, discount)
                for i, likely in enumerate(self._ahead(scan, layer, start[rows], read)):
                    current[rows, layer, i] = likely
            scan.close()
        return Forecast(upcoming, start, current, values, left)

    def _mix(self, moment: str, inputs: np.ndarray | None) -> Mix:
        return self.mixes[moment if inputs is None else moment + HIDDEN]

    def _start(self, scan: Scan, upcoming: np.ndarray, embeddings: np.ndarray | None) -> np.ndarray:
        if embeddings is None or self.knowledge.embedding_map is None:
            return upcoming
        return self.mixes["start"](scan.start(upcoming, embeddings))

    def _left(self, scan: Scan, layer: int, inputs: np.ndarray | None, discount: float) -> np.ndarray:
        return self._mix(f"left-{discount:g}", inputs)(scan.after(layer, inputs))[:, 0]

    def _ahead(self, scan: Scan, layer: int, known: np.ndarray, inputs: np.ndarray | None) -> Iterator[np.ndarray]:
        """Probabilities [B, J] for the layers after ``layer``, nearest first."""
        if layer == len(self.knowledge.popularity) - 1:
            return
        features = scan.ahead(layer, known, inputs)
        for i in range(features["prior"].shape[1]):
            mix = self._mix(f"ahead-{i + 1}", inputs)
            yield mix({name: features[name][:, i] for name in mix.names})


class LiveForecast:
    """The same, an iteration and a gate at a time, for one running request."""

    def __init__(self, fitted: FittedPredictors, discount: float) -> None:
        self._fitted = fitted
        self._discount = discount
        popularity = fitted.knowledge.popularity
        self._state = RequestState(popularity)
        self._known = self.upcoming = popularity
        self.values = steady_value(popularity, discount)
        self._scan: Scan | None = None

    def begin(self, embedding: np.ndarray | None) -> np.ndarray:
        """An iteration begins, with its embedding [h]: probabilities [L, J] of use in it."""
        self._scan = Scan(self._fitted.knowledge, self._state, 1)
        embeddings = None if embedding is None else embedding[None]
        self._known = self._fitted._start(self._scan, self.upcoming[None], embeddings)
        return self._known[0]

    def observe(
        self, layer: int, probabilities: np.ndarray, uses: np.ndarray, inputs: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gate ``layer`` has decided: its distribution and uses [J], and what it read [H].

        Returns:
            The value [J] of keeping the layer's experts for its next visit, and probabilities of use [D, J] in the
            layers after it; fewer at the end.
        """
        scan, fitted = self._scan, self._fitted
        assert scan is not None
        read = None if inputs is None or not fitted.reads_gate_inputs else inputs[None]
        scan.fill(layer, probabilities[None], uses[None])
        scan.advance(layer)
        left = fitted._left(scan, layer, read, self._discount)[0]
        ahead = [likely[0] for likely in fitted._ahead(scan, layer, self._known, read)]
        if layer == len(fitted.knowledge.popularity) - 1:
            following = scan.following(read)
            self.upcoming = fitted._mix("next", read)(following)[0]
            self.values = fitted._mix(f"value-{self._discount:g}", read)(following)[0]
            scan.close()
        return left, np.stack(ahead) if ahead else np.empty((0, len(left)), dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TracedBlock:
    """Consecutive iterations of one phase of a request: rows of it, and their arrays [B, ...]."""

    rows: slice
    maps: np.ndarray
    uses: np.ndarray
    inputs: np.ndarray | None
    embeddings: np.ndarray | None


def blocks(request: TracedRequest, experts: int) -> Iterator[TracedBlock]:
    """A request in pieces that can be scanned at once."""
    maps, uses = request.maps(experts), request.uses(experts)
    gate_inputs = getattr(request, "gate_inputs", None)
    for phase, places in groupby(range(len(request)), key=lambda t: request.phases[t]):
        run: Sequence[int] = list(places)
        for first in range(run[0], run[-1] + 1, BLOCK):
            rows = slice(first, min(first + BLOCK, run[-1] + 1))
            yield TracedBlock(
                rows,
                maps[rows],
                uses[rows],
                None if gate_inputs is None or phase == "prefill" else gate_inputs[rows],
                None if request.embeddings is None else request.embeddings[rows],
            )


def steady_value(probability: np.ndarray, discount: float) -> np.ndarray:
    """Expected discounted next use of an expert that every iteration uses with this probability."""
    return probability / (1.0 - discount * (1.0 - probability))

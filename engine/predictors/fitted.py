"""Calibrated probabilities of use: everything a store teaches, mixed, for replays and live engines alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from engine.predictors.features import log_odds, stack_features
from engine.predictors.knowledge import Knowledge, Scan
from engine.predictors.lessons import RequestLessons
from engine.predictors.mix import Mix, join_mixes
from engine.predictors.request_state import BLOCK, RequestState
from engine.records import Phase
from engine.traces import TracedRequest

DISCOUNTS = (0.25, 0.5, 0.75, 0.9)
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

    def forecast(self, request: TracedRequest, discount: float, lessons: RequestLessons | None = None) -> Forecast:
        """Estimates for every iteration of a request; ``lessons`` are given what can be learnt of it."""
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
        for block in blocks(request, experts, knowledge.top_k):
            rows = block.rows
            scan = Scan(knowledge, state, len(block.maps))
            for layer in range(layers):
                scan.fill(layer, block.maps[:, layer], block.uses[:, layer])
            scan.advance_to_end()
            inputs = block.inputs if self.reads_gate_inputs else None
            known = self.following(scan, None if inputs is None else inputs[:, -1], discount)
            after = slice(rows.start + 1, rows.stop + 1)
            upcoming[after], values[after] = known
            if lessons is not None:
                lessons.begin(len(block.maps))
            start[rows] = self.start(scan, upcoming[rows], block.embeddings, lessons)
            prior = log_odds(start[rows])
            for layer in range(layers):
                read = None if inputs is None else inputs[:, layer]
                scan.advance(layer)
                left[rows, layer] = self.left(scan, layer, read, discount)
                likely = self.ahead(scan, layer, prior, read, lessons)
                current[rows, layer, : likely.shape[1]] = likely
            if lessons is not None:
                lessons.settle(block.uses)
            scan.close()
        return Forecast(upcoming, start, current, values, left)

    def following(self, scan: Scan, inputs: np.ndarray | None, discount: float) -> tuple[np.ndarray, np.ndarray]:
        """Once iterations are complete: probabilities of use in the next ones, and values, [B, L, J] each.

        Args:
            inputs: [B, H], what the last gate read.
        """
        features = scan.following(inputs)
        return self._mix("next", inputs)(features), self._mix(f"value-{discount:g}", inputs)(features)

    def upcoming(self, scan: Scan, inputs: np.ndarray | None) -> np.ndarray:
        """The probabilities alone."""
        return self._mix("next", inputs)(scan.following(inputs))

    def start(
        self,
        scan: Scan,
        upcoming: np.ndarray,
        embeddings: np.ndarray | None,
        lessons: RequestLessons | None = None,
    ) -> np.ndarray:
        """As iterations of these embeddings [B, h] begin: probabilities of use in them, ``upcoming`` having been so."""
        if embeddings is None or "start" not in self.mixes:
            return upcoming
        mix = self.mixes["start"]
        stack = stack_features(mix.names, scan.start(upcoming, embeddings))
        if lessons is not None:
            lessons.note(["start"] * upcoming.shape[1], 0, stack)
        return mix.weigh(stack)

    def left(self, scan: Scan, layer: int, inputs: np.ndarray | None, discount: float) -> np.ndarray:
        """Once gate ``layer`` has decided, having read inputs [B, H]: values [B, J] of its layer from then on."""
        return self._mix(f"left-{discount:g}", inputs)(scan.after(layer, inputs))[:, 0]

    def ahead(
        self,
        scan: Scan,
        layer: int,
        prior: np.ndarray,
        inputs: np.ndarray | None,
        lessons: RequestLessons | None = None,
    ) -> np.ndarray:
        """At that moment: probabilities of use in the n layers after it, [B, n, J]; ``prior`` are log-odds before."""
        layers, experts = self.knowledge.popularity.shape
        count = min(self.knowledge.depth, layers - 1 - layer)
        if not count:
            return np.empty((len(prior), 0, experts), dtype=np.float32)
        moments = [f"ahead-{i + 1}" if inputs is None else f"ahead-{i + 1}{HIDDEN}" for i in range(count)]
        mix = join_mixes(tuple(self.mixes[moment] for moment in moments))
        stack = stack_features(mix.names, scan.ahead(layer, prior, inputs))
        if lessons is not None:
            lessons.note(moments, layer + 1, stack)
        return mix.weigh(stack)

    def _mix(self, moment: str, inputs: np.ndarray | None) -> Mix:
        return self.mixes[moment if inputs is None else moment + HIDDEN]


@dataclass(frozen=True, slots=True, eq=False)
class TracedBlock:
    """Consecutive iterations of one phase of a request: rows of it, and their arrays [B, ...]."""

    rows: slice
    maps: np.ndarray
    uses: np.ndarray
    inputs: np.ndarray | None
    embeddings: np.ndarray | None


def blocks(request: TracedRequest, experts: int, top_k: int) -> Iterator[TracedBlock]:
    """A request in pieces that can be scanned at once."""
    maps, uses = request.maps(experts), request.uses(experts)
    gate_inputs = request.gate_inputs
    for phase, places in groupby(range(len(request)), key=lambda t: request.phases[t]):
        run: Sequence[int] = list(places)
        for first in range(run[0], run[-1] + 1, BLOCK):
            rows = slice(first, min(first + BLOCK, run[-1] + 1))
            yield TracedBlock(
                rows,
                maps[rows],
                token_uses(maps[rows], uses[rows], phase, top_k),
                None if gate_inputs is None or phase == "prefill" else gate_inputs[rows],
                None if request.embeddings is None else request.embeddings[rows],
            )


def token_uses(maps: np.ndarray, uses: np.ndarray, phase: Phase, top_k: int) -> np.ndarray:
    """Uses by one token: those of a decode step; for the many of a prefill, whose uses tell little, what to expect."""
    return uses if phase == "decode" else np.minimum(top_k * maps, 1.0)


def steady_value(probability: np.ndarray, discount: float) -> np.ndarray:
    """Expected discounted next use of an expert that every iteration uses with this probability."""
    return probability / (1.0 - discount * (1.0 - probability))

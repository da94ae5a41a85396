"""``adaptive``: keep what is worth most at its next visit, fetch what is likely to be used in this token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.eviction import EvictionRule
from engine.expected_use import ExpectedUse, missing_rest, raise_values
from engine.hardware import Hardware
from engine.observations import ObservedGate, ObservedIteration
from engine.policies import NOT_SEARCHED, NOTHING, Offers
from engine.predictors.fitted import FittedPredictors, Forecast
from engine.predictors.live import LiveForecast
from engine.predictors.online import OnlinePredictors
from engine.selection import select_deliverable
from engine.traces import TracedRequest
from engine.transfer_queue import Prefetch


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """What ``choose_settings`` finds by replaying the store's side.

    Attributes:
        discount: what an expert loses of its worth with each token until its use; one of ``DISCOUNTS``.
        threshold: probability from which an expert is fetched ahead; above 1 none is.
        depth: layers fetched ahead at most.
        price: what a copy that nobody waits for has to gain, see ``ExpectedUse``.
    """

    discount: float
    threshold: float
    depth: int
    price: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class AdaptivePlan:
    """What a live engine takes ``adaptive`` from.

    Attributes:
        settings: None for plain LRU, where nothing was found to beat it.
        hardware: what copies and layers take, if that is known.
        capacity: experts there is room for, if that is known.
    """

    predictors: FittedPredictors
    settings: AdaptiveSettings | None
    hardware: Hardware | None
    capacity: int | None


class Adaptive:
    """Expected use decides evictions; what is known of the current token raises it, never lowers it, and is fetched.

    Several sequences of a batch count as one that uses whatever any of them does. What cannot arrive in time is not
    sent, where ``hardware`` tells; nor what would make the bytes moved exceed recency's, where ``capacity`` is known.
    """

    per_layer = False
    library_scores = NOT_SEARCHED

    def __init__(
        self, predictors: FittedPredictors, settings: AdaptiveSettings, hardware: Hardware | None, capacity: int | None
    ) -> None:
        layers, experts = predictors.knowledge.popularity.shape
        self._rule = ExpectedUse(layers, experts, settings.discount, settings.price, capacity)
        self.rule: EvictionRule = self._rule
        self.needs_gate_inputs = predictors.reads_gate_inputs
        self._predictors = OnlinePredictors(predictors)
        self._settings = settings
        self._hardware = hardware
        self._sequences: dict[int, LiveForecast] = {}
        self._known: list[np.ndarray] = []
        self._missing: list[np.ndarray] = []
        self._begun = 0

    def begin(self, iteration: ObservedIteration) -> Offers:
        earlier, discount = self._sequences, self._settings.discount
        self._sequences = {
            n: earlier[n] if n in earlier else self._predictors.follow(discount) for n in iteration.sequences
        }
        layers = len(self._rule.worth)
        self._begun = iteration.number * layers
        self._rule.move(-1)
        if not self._sequences:
            return NOTHING
        self._known = [
            forecast.begin(iteration.phase, None if iteration.embeddings is None else iteration.embeddings[row])
            for row, forecast in enumerate(self._sequences.values())
        ]
        self._missing = [missing_rest(forecast.values, forecast.upcoming) for forecast in self._sequences.values()]
        self._rule.worth[:] = _any_of(
            [
                raise_values(forecast.values, forecast.upcoming, missing, known)
                for forecast, missing, known in zip(self._sequences.values(), self._missing, self._known, strict=True)
            ]
        )
        return self._fetch(_any_of([known[: self._settings.depth] for known in self._known]), first=0)

    def observe(self, gate: ObservedGate) -> Offers:
        layer, rule = gate.layer, self._rule
        rule.move(layer)
        lefts, aheads, raised = [], [], []
        for row, forecast in enumerate(self._sequences.values()):
            values, upcoming = forecast.values, forecast.upcoming
            inputs = None if gate.inputs is None else gate.inputs[row]
            left, ahead = forecast.observe(layer, gate.probabilities[row], gate.uses[row], inputs)
            targets = slice(layer + 1, layer + 1 + len(ahead))
            known = np.maximum(self._known[row][targets], ahead)
            lefts.append(left)
            aheads.append(ahead)
            raised.append(raise_values(values[targets], upcoming[targets], self._missing[row][targets], known))
        if not lefts:
            return NOTHING
        rule.worth[layer] = _any_of(lefts)
        rule.worth[layer + 1 : layer + 1 + len(aheads[0])] = _any_of(raised)
        return self._fetch(_any_of([ahead[: self._settings.depth] for ahead in aheads]), first=layer + 1)

    def _fetch(self, likely: np.ndarray, first: int) -> Offers:
        """Absent experts of layers ``first`` and on, likely enough [D, J], as many as the link can deliver."""
        if not self._rule.has_allowance:
            return NOTHING
        experts = likely.shape[1]
        absent = self._rule.absent
        ahead, found = np.nonzero(likely >= self._settings.threshold)
        wanted = []
        for i, expert, p in zip(ahead.tolist(), found.tolist(), likely[ahead, found].tolist(), strict=True):
            key = (first + i) * experts + expert
            if absent[key]:
                wanted.append(Prefetch(key, self._begun + first + i, p))
        if self._hardware is None or not wanted:
            return wanted
        return select_deliverable(wanted, self._begun + first - 1, self._hardware)


class PreparedAdaptive:
    """The same for replays: all estimates of a request at once."""

    per_layer = False

    def __init__(
        self,
        layers: int,
        experts: int,
        hardware: Hardware,
        capacity: int | None,
        settings: AdaptiveSettings,
        forecast: Callable[[TracedRequest, float], Forecast],
    ) -> None:
        self._rule = ExpectedUse(layers, experts, settings.discount, settings.price, capacity)
        self.rule: EvictionRule = self._rule
        self._layers = layers
        self._experts = experts
        self._hardware = hardware
        self._settings = settings
        self._forecast = forecast
        nothing: np.ndarray = np.empty(0, dtype=np.float32)
        self._before = self._left = self._raised = nothing
        self._start = self._ahead = _NOBODY
        self._position = 0

    def begin_request(self, request: TracedRequest, position: int) -> None:
        forecast = self._forecast(request, self._settings.discount)
        layers, depth = self._layers, int(forecast.current.shape[2])
        upcoming, values = forecast.upcoming[:-1], forecast.values[:-1]
        missing = missing_rest(values, upcoming)
        self._before = raise_values(values, upcoming, missing, forecast.start)
        self._left = forecast.left
        self._raised = np.zeros_like(forecast.current)
        for i in range(min(depth, layers - 1)):
            ahead = slice(i + 1, layers)
            known = np.maximum(forecast.start[:, ahead], forecast.current[:, : layers - i - 1, i])
            self._raised[:, : layers - i - 1, i] = raise_values(
                values[:, ahead], upcoming[:, ahead], missing[:, ahead], known
            )
        depth = min(depth, self._settings.depth)
        self._start = self._likely(forecast.start[:, None, :depth], first_layer=0)
        self._ahead = self._likely(forecast.current[:, :, :depth], first_layer=1)
        self._position = position

    def begin_iteration(self, iteration: int) -> Offers:
        self._rule.move(-1)
        self._rule.worth[:] = self._before[iteration]
        return self._fetch(self._start, iteration, self._position + iteration * self._layers - 1)

    def observe(self, iteration: int, layer: int) -> Offers:
        rule, layers = self._rule, self._layers
        rule.move(layer)
        rule.worth[layer] = self._left[iteration, layer]
        ahead = min(self._raised.shape[2], layers - 1 - layer)
        rule.worth[layer + 1 : layer + 1 + ahead] = self._raised[iteration, layer, :ahead]
        moment = iteration * layers + layer
        return self._fetch(self._ahead, moment, self._position + moment)

    def _likely(self, known: np.ndarray, first_layer: int) -> _Likely:
        """Who is likely at each moment of ``known`` [T, M, D, J], whose layer i is ``moment + first_layer + i``."""
        iterations, moments, _, experts = known.shape
        found = np.nonzero(known >= self._settings.threshold)
        iteration, moment, ahead, expert = found
        counts = np.bincount(iteration * moments + moment, minlength=iterations * moments)
        return _Likely(
            keys=((moment + first_layer + ahead) * experts + expert).tolist(),
            distances=(ahead + 1).tolist(),
            probabilities=known[found].tolist(),
            bounds=[0, *counts.cumsum().tolist()],
        )

    def _fetch(self, likely: _Likely, moment: int, now: int) -> Offers:
        """Those of a moment that are absent, as many as the link can deliver; ``now`` is the last gate's position."""
        first, stop = likely.bounds[moment], likely.bounds[moment + 1]
        if first == stop or not self._rule.has_allowance:
            return NOTHING
        absent = self._rule.absent
        wanted = [
            Prefetch(likely.keys[i], now + likely.distances[i], likely.probabilities[i])
            for i in range(first, stop)
            if absent[likely.keys[i]]
        ]
        return select_deliverable(wanted, now, self._hardware) if wanted else NOTHING


@dataclass(frozen=True, slots=True)
class _Likely:
    """Experts likely enough to be fetched ahead; ``[bounds[m] : bounds[m + 1]]`` are those of moment m.

    Attributes:
        distances: layers between the gate that decided last and theirs.
    """

    keys: list[int]
    distances: list[int]
    probabilities: list[float]
    bounds: list[int]


_NOBODY = _Likely([], [], [], [0])


def _any_of(probabilities: list[np.ndarray]) -> np.ndarray:
    """The probability that any of independent sequences uses an expert."""
    if len(probabilities) == 1:
        return probabilities[0]
    return 1.0 - np.prod([1.0 - p for p in probabilities], axis=0)

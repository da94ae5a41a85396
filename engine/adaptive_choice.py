"""Choosing the settings of ``adaptive`` on the store's side of a split: by replays of a part held out of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from engine.adaptive import AdaptivePlan, AdaptiveSettings, PreparedAdaptive
from engine.eviction import LeastRecentlyUsed
from engine.hardware import Hardware
from engine.policies import PreparedOnDemand, PreparedPolicy
from engine.predictors.fitted import DISCOUNTS, FittedPredictors
from engine.predictors.fitting import DEPTH, fit_predictors
from engine.predictors.online import RequestOrder, RequestReader
from engine.replay import Replay, ReplayOutcome
from engine.traces import RoutingTrace, TracedRequest

NEVER = 2.0
"""A threshold that no probability reaches: evict by expected use, fetch nothing ahead."""

THRESHOLDS = (NEVER, 0.25, 0.45, 0.65, 0.85)
_MIDDLE = AdaptiveSettings(discount=0.75, threshold=0.65, depth=DEPTH)
_STORE_SHARE = 0.7
_ITERATIONS = 500
_WARM_UP = 100
_FEWEST = 4
_PRICES = (0.0, 0.1, 0.3, 0.6)


class AdaptiveFit:
    """What ``adaptive`` takes from recorded requests: predictors fitted on all, settings by replaying some.

    Both are worked out when first asked for; settings once for each machine, capacity and executor. Settings of None
    stand for plain LRU.

    Raises, once asked:
        PolicyError: see ``fit_predictors``.
    """

    def __init__(self, store: RoutingTrace) -> None:
        self._store = store.decode_only()
        self._followed = [request for request in self._store.requests if len(request) > 1]
        self.settings = cache(self._choose)

    @cached_property
    def predictors(self) -> FittedPredictors:
        return fit_predictors(self._store)

    def forecasts(self) -> RequestReader:
        """Forecasts for one replay of requests, whichever they are; replays of the same ones share them."""
        return self._order.reader()

    @cached_property
    def _order(self) -> RequestOrder:
        return RequestOrder(self.predictors)

    def plan(self, hardware: Hardware | None, capacity: int | None = None, in_place: bool = False) -> AdaptivePlan:
        """For a live engine; with middling settings where its hardware or the experts it has room for are not known."""
        settings: AdaptiveSettings | None = _MIDDLE
        if hardware is not None and capacity is not None:
            settings = self.settings(hardware, capacity, in_place)
        return AdaptivePlan(self.predictors, settings, hardware, capacity)

    @cached_property
    def _trial(self) -> _Trial:
        return _Trial(RoutingTrace(self._store.manifest, tuple(self._followed)))

    def _choose(self, hardware: Hardware, capacity: int, in_place: bool) -> AdaptiveSettings | None:
        """Those of the lowest time an iteration among the candidates that move no more bytes than LRU.

        None if all of them are slower than LRU there.
        """
        if len(self._followed) < _FEWEST:
            return _MIDDLE
        recency = self._trial.replay_lru(hardware, capacity, in_place)

        def cost(settings: AdaptiveSettings) -> tuple[float, float]:
            outcome = self._trial.replay(settings, hardware, capacity, in_place)
            return (max(outcome.bytes_moved - recency.bytes_moved, 0.0), outcome.tpot_seconds)

        best = _MIDDLE
        for tried in _coordinates(in_place):
            best = min((replace(best, **change) for change in tried), key=cost)
        return best if cost(best) < (0.0, recency.tpot_seconds) else None


class _Trial:
    """A part of the store and predictors fitted on the rest."""

    def __init__(self, store: RoutingTrace) -> None:
        known, held_out = store.split(_STORE_SHARE)
        self._order = RequestOrder(fit_predictors(known))
        self._test = _first(held_out, _ITERATIONS)
        self.replay = cache(self._replay)

    def replay_lru(self, hardware: Hardware, capacity: int, in_place: bool) -> ReplayOutcome:
        return self._run(PreparedOnDemand(LeastRecentlyUsed(self._test.manifest.keys)), hardware, capacity, in_place)

    def _replay(self, settings: AdaptiveSettings, hardware: Hardware, capacity: int, in_place: bool) -> ReplayOutcome:
        manifest = self._test.manifest
        policy = PreparedAdaptive(manifest.layers, manifest.experts, hardware, capacity, settings, self._order.reader())
        return self._run(policy, hardware, capacity, in_place)

    def _run(self, policy: PreparedPolicy, hardware: Hardware, capacity: int, in_place: bool) -> ReplayOutcome:
        return Replay(self._test, policy, hardware, capacity, in_place).run(_WARM_UP)


def _coordinates(in_place: bool) -> Iterator[list[dict[str, Any]]]:
    """What is tried one after the other, each around the best so far."""
    yield [{"threshold": threshold} for threshold in THRESHOLDS]
    if in_place:
        yield [{"price": price} for price in _PRICES]
    yield [{"discount": discount} for discount in DISCOUNTS]


def _first(trace: RoutingTrace, iterations: int) -> RoutingTrace:
    """Whole requests of a trace until they have so many iterations."""
    kept: list[TracedRequest] = []
    for request in trace.requests:
        kept.append(request)
        if sum(map(len, kept)) >= iterations:
            break
    return RoutingTrace(trace.manifest, tuple(kept))

"""Predictors that go on learning from the requests they forecast."""

from __future__ import annotations

from engine.predictors.fitted import FittedPredictors, Forecast
from engine.predictors.lessons import MixLessons, RequestLessons
from engine.predictors.live import LiveForecast
from engine.traces import TracedRequest


class OnlinePredictors:
    """Fitted predictors whose mixes are refitted as requests go by; what a store holds stays as it is."""

    def __init__(self, fitted: FittedPredictors) -> None:
        self._lessons = MixLessons(fitted.mixes, *fitted.knowledge.popularity.shape)
        self.current = FittedPredictors(fitted.knowledge, self._lessons.mixes)

    def follow(self, discount: float) -> LiveForecast:
        """A request begins: its forecasts, an iteration and a gate at a time."""
        self._lessons.refit()
        return LiveForecast(self.current, discount, RequestLessons(self._lessons))

    def forecast(self, request: TracedRequest, discount: float) -> Forecast:
        """The next request, at once."""
        self._lessons.refit()
        return self.current.forecast(request, discount, RequestLessons(self._lessons))


class RequestOrder:
    """Forecasts of requests in one order, learnt from on the way, for replays that share them.

    Each replay asks through its own ``reader``; those that go through the same requests are answered from memory.
    """

    def __init__(self, fitted: FittedPredictors) -> None:
        self._fitted = fitted
        self._known: dict[tuple[float, tuple[int, ...]], Forecast] = {}
        self._learners: dict[tuple[float, tuple[int, ...]], OnlinePredictors] = {}
        self._requests: dict[int, TracedRequest] = {}

    def reader(self) -> RequestReader:
        """For one replay."""
        return RequestReader(self)

    def forecast(self, path: tuple[int, ...], discount: float) -> Forecast:
        """Of the last of the requests with these identities, after the others."""
        place = (discount, path)
        if place not in self._known:
            before = (discount, path[:-1])
            learner = self._learners.pop(before, None)
            if learner is None:
                learner = OnlinePredictors(self._fitted)
                for earlier in path[:-1]:
                    learner.forecast(self._requests[earlier], discount)
            self._known[place] = learner.forecast(self._requests[path[-1]], discount)
            self._learners[place] = learner
        return self._known[place]

    def meet(self, request: TracedRequest) -> int:
        """The identity of a request."""
        self._requests[id(request)] = request
        return id(request)


class RequestReader:
    """Forecasts for one replay, request after request."""

    def __init__(self, order: RequestOrder) -> None:
        self._order = order
        self._path: tuple[int, ...] = ()

    def __call__(self, request: TracedRequest, discount: float) -> Forecast:
        self._path = (*self._path, self._order.meet(request))
        return self._order.forecast(self._path, discount)

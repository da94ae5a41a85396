"""Forecasts of a running request, an iteration and a gate at a time."""

from __future__ import annotations

import numpy as np

from engine.predictors.features import log_odds
from engine.predictors.fitted import FittedPredictors, steady_value, token_uses
from engine.predictors.knowledge import Scan
from engine.predictors.lessons import RequestLessons
from engine.predictors.request_state import RequestState
from engine.records import Phase


class LiveForecast:
    """What ``FittedPredictors.forecast`` tells of a whole request, as it goes on.

    Attributes:
        upcoming: float32 [L, J], probability of use in the next iteration, before it.
        values: float32 [L, J], expected discounted next use before it.
    """

    def __init__(self, fitted: FittedPredictors, discount: float, lessons: RequestLessons | None = None) -> None:
        self._fitted = fitted
        self._discount = discount
        self._lessons = lessons
        popularity = fitted.knowledge.popularity
        self._state = RequestState(popularity)
        self._phase: Phase = "decode"
        self._prior = self.upcoming = popularity
        self.values = steady_value(popularity, discount)
        self._scan = Scan(fitted.knowledge, self._state, 1)

    def begin(self, phase: Phase, embedding: np.ndarray | None) -> np.ndarray:
        """An iteration begins, with its embedding [h]: probabilities [L, J] of use in it."""
        self._phase = phase
        self._scan = Scan(self._fitted.knowledge, self._state, 1)
        embeddings = None if embedding is None else embedding[None]
        if self._lessons is not None:
            self._lessons.begin(1)
        known = self._fitted.start(self._scan, self.upcoming[None], embeddings, self._lessons)
        self._prior = log_odds(known)
        return known[0]

    def observe(
        self, layer: int, probabilities: np.ndarray, uses: np.ndarray, inputs: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gate ``layer`` has decided: its distribution and uses [J], and what it read [H].

        Returns:
            The value [J] of keeping the layer's experts for its next visit, and probabilities of use [D, J] in the
            layers after it; fewer at the end.
        """
        scan, fitted = self._scan, self._fitted
        knowledge = fitted.knowledge
        read = None if inputs is None or not fitted.reads_gate_inputs else inputs[None]
        used = token_uses(probabilities[None], uses[None], self._phase, knowledge.top_k)
        scan.fill(layer, probabilities[None], used)
        scan.advance(layer)
        left = fitted.left(scan, layer, read, self._discount)[0]
        ahead = fitted.ahead(scan, layer, self._prior, read, self._lessons)[0]
        if layer == len(knowledge.popularity) - 1:
            upcoming, values = fitted.following(scan, read, self._discount)
            self.upcoming, self.values = upcoming[0], values[0]
            if self._lessons is not None:
                self._lessons.settle(scan.uses)
            scan.close()
        return left, ahead

"""What every predictor said of recorded requests, and what came of it: the rows that mixes are fitted on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.predictors.features import Features, log_odds
from engine.predictors.fitted import DISCOUNTS, FittedPredictors, TracedBlock, blocks, steady_value
from engine.predictors.knowledge import Scan
from engine.predictors.request_state import RequestState
from engine.predictors.row_sample import RowSample
from engine.traces import TracedRequest

ROWS = 20_000
"""Drawn a request and moment."""


class RequestSampler:
    """Draws rows from one request after the other.

    Args:
        fitted: what is known; its mixes need only be those of earlier moments.
        known_requests: requests may be among the stored ones, and then do not find themselves there.
    """

    def __init__(self, fitted: FittedPredictors, sample: RowSample, known_requests: bool) -> None:
        self._fitted = fitted
        self._knowledge = fitted.knowledge
        self._layers, self._experts = fitted.knowledge.popularity.shape
        self._sample = sample
        self._known_requests = known_requests

    def add_next(self, request: TracedRequest) -> None:
        """Of next iterations (``next``, ``value-GAMMA``)."""
        uses = request.uses(self._experts)
        values = self._values(uses)
        for scan, block in self._scans(request):
            share = len(block.maps) / len(request)
            known, after = _followed(block, request)
            scan.advance_to_end()
            features = _head(scan.following(self._inputs(block, -1)), known)
            outcomes = {"next": uses[after], **{f"value-{g:g}": v[after] for g, v in values.items()}}
            for moment, outcome in outcomes.items():
                self._sample.add(moment, features, outcome, round(ROWS * share))

    def add_left(self, request: TracedRequest) -> None:
        """Of a layer's own next visit (``left-GAMMA``)."""
        values = self._values(request.uses(self._experts))
        for scan, block in self._scans(request):
            share = len(block.maps) / len(request)
            known, after = _followed(block, request)
            for layer in range(self._layers):
                scan.advance(layer)
                features = _head(scan.after(layer, self._inputs(block, layer)), known)
                for g, v in values.items():
                    outcome = v[after, layer : layer + 1]
                    self._sample.add(f"left-{g:g}", features, outcome, round(ROWS * share / self._layers))

    def add_starts(self, request: TracedRequest) -> None:
        """Of iterations whose embedding is known (``start``); needs the mixes of ``next``."""
        for scan, block, upcoming in self._foreseen(request):
            if block.embeddings is not None:
                share = len(block.maps) / len(request)
                self._sample.add("start", scan.start(upcoming, block.embeddings), block.uses, round(ROWS * share))

    def add_ahead(self, request: TracedRequest) -> None:
        """Of layers of the running iteration (``ahead-D``); needs the mixes of ``next`` and ``start``."""
        for scan, block, upcoming in self._foreseen(request):
            prior = log_odds(self._fitted.start(scan, upcoming, block.embeddings))
            count = round(ROWS * len(block.maps) / len(request) / self._layers)
            for layer in range(self._layers - 1):
                scan.advance(layer)
                features = scan.ahead(layer, prior, self._inputs(block, layer))
                for i in range(features["prior"].shape[1]):
                    here = {name: f[:, i] for name, f in features.items()}
                    self._sample.add(f"ahead-{i + 1}", here, block.uses[:, layer + 1 + i], count)

    def _values(self, uses: np.ndarray) -> dict[float, np.ndarray]:
        popularity = self._knowledge.popularity
        return {g: discounted_next_use(uses, steady_value(popularity, g), g) for g in DISCOUNTS}

    def _scans(self, request: TracedRequest) -> Iterator[tuple[Scan, TracedBlock]]:
        """Filled scans of the whole request."""
        state = RequestState(self._knowledge.popularity)
        excluded = request.request if self._known_requests else None
        for block in blocks(request, self._experts, self._knowledge.top_k):
            scan = Scan(self._knowledge, state, len(block.maps), excluded)
            for layer in range(self._layers):
                scan.fill(layer, block.maps[:, layer], block.uses[:, layer])
            yield scan, block
            scan.close()

    def _foreseen(self, request: TracedRequest) -> Iterator[tuple[Scan, TracedBlock, np.ndarray]]:
        """The same, with what was known [B, L, J] before each iteration."""
        before = self._knowledge.popularity[None]
        for scan, block in self._scans(request):
            scan.advance_to_end()
            after = self._fitted.upcoming(scan, self._inputs(block, -1))
            yield scan, block, np.concatenate([before, after[:-1]])
            before = after[-1:]

    def _inputs(self, block: TracedBlock, layer: int) -> np.ndarray | None:
        return block.inputs[:, layer] if block.inputs is not None and self._fitted.reads_gate_inputs else None


def discounted_next_use(uses: np.ndarray, beyond: np.ndarray, discount: float) -> np.ndarray:
    """``discount`` to the iterations until the next use, [T + 1, ...] for uses [T, ...]; ``beyond`` after the last."""
    values = np.empty((len(uses) + 1, *uses.shape[1:]), dtype=np.float32)
    values[-1] = beyond
    for t in range(len(uses) - 1, -1, -1):
        values[t] = uses[t] + (1 - uses[t]) * discount * values[t + 1]
    return values


def _followed(block: TracedBlock, request: TracedRequest) -> tuple[int, slice]:
    """How many rows of a block have a successor in the request, and where those are: the last step's is not known."""
    known = min(block.rows.stop, len(request) - 1) - block.rows.start
    return known, slice(block.rows.start + 1, block.rows.start + 1 + known)


def _head(features: Features, rows: int) -> Features:
    return {name: f[:rows] for name, f in features.items()}

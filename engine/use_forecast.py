"""How likely each expert is to be used at its next visit: calibrated estimates from routing alone.

Before an iteration: a logistic of three decayed recencies, the previous token's gates, popularity, and what followed
similar iterations of the store and of the same request. Within one: for each distance a logistic of that estimate and
of what similar iterations, by the trajectory so far, used in the layer ahead (FINDINGS sections 1 and 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.logistic import fit_logistic, sigmoid
from engine.map_search import MapArchive
from engine.traces import RoutingTrace, TracedRequest

DECAYS = (0.7, 0.85, 0.93)
FARTHEST = 6

_FLOOR = 0.01
_SHARPNESS = 25.0
# The similarity of an iteration of the request that counts as much as popularity.
_POPULARITY_COSINE = 0.5
_TRAINING_REQUESTS = 8
_ROWS_A_REQUEST = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Probabilities of use for a request of T iterations.

    Attributes:
        upcoming: [T + 1, L, J], what is known before iteration t of its uses.
        lasting: [T + 1, L, J], the same without successors: an estimate for any later token.
        current: [T, L, D, J]; once gate l has decided, of the uses of layer l + 1 + i of the same iteration.
    """

    upcoming: np.ndarray
    lasting: np.ndarray
    current: np.ndarray


class UseForecaster:
    """Forecasts fitted on the store's side alone; a training request never finds itself in the archive."""

    def __init__(self, store: RoutingTrace, archive: MapArchive) -> None:
        self._archive = archive
        self._experts = store.manifest.experts
        self._farthest = min(FARTHEST, store.manifest.layers - 1)
        uses = [request.uses(self._experts) for request in store.requests]
        self._popularity = np.concatenate(uses).mean(axis=0)
        step = -(-len(store.requests) // _TRAINING_REQUESTS)
        training = store.requests[::step]
        rng = np.random.default_rng(0)
        self._lasting, self._upcoming = self._fit_upcoming(training, rng)
        self._current = self._fit_current(training, rng)

    def forecast(self, request: TracedRequest) -> Forecast:
        """Estimates for every iteration of a request, each from what was known at its moment."""
        history = self._history(request)
        successors = self._successors(request, None)
        lasting = _apply(self._lasting, history)
        upcoming = _apply(self._upcoming, [*history, *successors])
        iterations = len(request)
        layers, experts = self._popularity.shape
        current = np.zeros((iterations, layers, self._farthest, experts), dtype=np.float32)
        for layer, distance, features in self._similar(request, None):
            prior = _log(upcoming[:-1, layer + distance])
            current[:, layer, distance - 1] = _apply(self._current[distance - 1], [prior, *features])
        return Forecast(upcoming, lasting, current)

    def _fit_upcoming(
        self, training: tuple[TracedRequest, ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        rows, targets = [], []
        for request in training:
            features = [*self._history(request), *self._successors(request, request.request)]
            uses = request.uses(self._experts).reshape(-1)
            pick = rng.integers(0, len(uses), _ROWS_A_REQUEST)
            rows.append(np.column_stack([f[:-1].reshape(-1)[pick] for f in features]))
            targets.append(uses[pick])
        known, happened = np.concatenate(rows), np.concatenate(targets)
        return fit_logistic(known[:, : len(DECAYS) + 2], happened), fit_logistic(known, happened)

    def _fit_current(self, training: tuple[TracedRequest, ...], rng: np.random.Generator) -> list[np.ndarray]:
        rows: list[list[np.ndarray]] = [[] for _ in range(self._farthest)]
        targets: list[list[np.ndarray]] = [[] for _ in range(self._farthest)]
        for request in training:
            mine = request.request
            upcoming = _apply(self._upcoming, [*self._history(request), *self._successors(request, mine)])
            uses = request.uses(self._experts)
            for layer, distance, features in self._similar(request, mine):
                target = uses[:, layer + distance].reshape(-1)
                pick = rng.integers(0, len(target), _ROWS_A_REQUEST // uses.shape[1])
                columns = [_log(upcoming[:-1, layer + distance]), *features]
                rows[distance - 1].append(np.column_stack([c.reshape(-1)[pick] for c in columns]))
                targets[distance - 1].append(target[pick])
        return [fit_logistic(np.concatenate(r), np.concatenate(t)) for r, t in zip(rows, targets, strict=True)]

    def _history(self, request: TracedRequest) -> list[np.ndarray]:
        """Logarithms [T + 1, L, J] of recencies, the previous gates and popularity, before each iteration."""
        uses, maps = request.uses(self._experts), request.maps(self._experts)
        shape = (len(request) + 1, *self._popularity.shape)
        recencies = [np.empty(shape, dtype=np.float32) for _ in DECAYS]
        for decay, recency in zip(DECAYS, recencies, strict=True):
            recency[0] = self._popularity
            for t in range(len(request)):
                recency[t + 1] = decay * recency[t] + (1 - decay) * uses[t]
        previous = np.concatenate([np.zeros((1, *shape[1:]), dtype=np.float32), maps])
        return [_log(f) for f in (*recencies, previous, np.broadcast_to(self._popularity, shape))]

    def _successors(self, request: TracedRequest, excluded: int | None) -> list[np.ndarray]:
        """Logarithms [T + 1, L, J] of what followed iterations like the previous one, in the store and the request."""
        uses, maps = request.uses(self._experts), request.maps(self._experts)
        iterations = len(request)
        stored = self._weights(self._archive.cosines(maps), excluded) @ self._archive.following.reshape(
            len(self._archive), -1
        )
        flat = maps.reshape(iterations, -1)
        own = _own_weights(_cosines(flat))
        followed = np.concatenate([uses[1:], uses[-1:]]).reshape(iterations, -1)
        mine = own[:, 1:] @ followed + own[:, :1] * self._popularity.reshape(1, -1)
        features = []
        for known in (stored, mine):
            before = np.concatenate([self._popularity.reshape(1, -1), known])
            features.append(_log(before.reshape(iterations + 1, *self._popularity.shape)))
        return features

    def _similar(
        self, request: TracedRequest, excluded: int | None
    ) -> Iterator[tuple[int, int, tuple[np.ndarray, np.ndarray]]]:
        """For each layer and distance the logarithms [T, J] of what iterations alike so far used in the layer ahead."""
        uses, maps = request.uses(self._experts), request.maps(self._experts)
        layers = maps.shape[1]
        products = np.zeros((len(request), len(request)), dtype=np.float32)
        squares = np.zeros(len(request), dtype=np.float32)
        for layer, cosines in enumerate(self._archive.prefix_cosines(maps)):
            products += maps[:, layer] @ maps[:, layer].T
            squares += np.square(maps[:, layer]).sum(axis=1)
            inverse = 1.0 / np.sqrt(squares + _FLOOR**2)
            own = _own_weights(products * inverse * inverse[:, None])
            stored = self._weights(cosines, excluded)
            for distance in range(1, min(self._farthest, layers - 1 - layer) + 1):
                target = layer + distance
                mine = own[:, 1:] @ uses[:, target] + own[:, :1] * self._popularity[target]
                yield layer, distance, (_log(stored @ self._archive.uses[:, target]), _log(mine))

    def _weights(self, cosines: np.ndarray, excluded: int | None) -> np.ndarray:
        """Weights [T, n] of stored iterations, each row summing to 1; none for those of the excluded request."""
        if excluded is not None:
            cosines = np.where(self._archive.owners == excluded, -1.0, cosines)
        weights = np.exp(_SHARPNESS * (cosines - cosines.max(axis=1, keepdims=True)))
        return weights / weights.sum(axis=1, keepdims=True)


def _own_weights(cosines: np.ndarray) -> np.ndarray:
    """Weights [T, 1 + T] of popularity and of the request's earlier iterations."""
    iterations = len(cosines)
    earlier = np.tril(np.ones((iterations, iterations), dtype=bool), k=-1)
    scores = np.concatenate([np.full((iterations, 1), _POPULARITY_COSINE), np.where(earlier, cosines, -np.inf)], axis=1)
    weights = np.exp(_SHARPNESS * (scores - scores.max(axis=1, keepdims=True))).astype(np.float32)
    return weights / weights.sum(axis=1, keepdims=True)


def _cosines(rows: np.ndarray) -> np.ndarray:
    normalized = rows / (np.linalg.norm(rows, axis=1, keepdims=True) + _FLOOR)
    return normalized @ normalized.T


def _log(probabilities: np.ndarray) -> np.ndarray:
    return np.log(probabilities + np.float32(_FLOOR))


def _apply(weights: np.ndarray, features: list[np.ndarray]) -> np.ndarray:
    total = np.full(features[0].shape, weights[-1], dtype=np.float32)
    for weight, feature in zip(weights[:-1].astype(np.float32), features, strict=True):
        total += weight * feature
    return sigmoid(total).astype(np.float32)

"""How much of what a gate chooses is predicted, by predictor and distance: what a profile reports of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.map_search import MapArchive
from engine.traces import RoutingTrace, TracedRequest

_DECAY = 0.85


@dataclass(frozen=True, slots=True)
class Recall:
    """Share of the routed experts that are among a predictor's K likeliest, told ``distance`` layers ahead.

    Attributes:
        routed: experts that were routed in the layers that can be predicted so far ahead.
    """

    predictor: str
    distance: int
    recall: float
    routed: int


def measure_recall(
    store: RoutingTrace, test: RoutingTrace, distances: Sequence[int], capacity: int
) -> tuple[Recall, ...]:
    """Recall on ``test`` of predictors that know ``store``, both of decode steps.

    All predictors are held to the same layers: those that lie ``distance`` behind a gate. What is known before the
    iteration (semantic search, popularity, recency) is not told more by the gates that have decided since.
    """
    archive = MapArchive.of(store, capacity)
    experts, top_k = test.manifest.experts, test.manifest.top_k
    popularity = np.concatenate([request.uses(experts) for request in store.requests]).mean(axis=0)
    found: dict[tuple[str, int], int] = defaultdict(int)
    routed: dict[tuple[str, int], int] = defaultdict(int)
    for request in test.requests:
        uses = request.uses(experts)
        for predictor, distance, scores in _predictions(request, archive, popularity, distances):
            likeliest = np.argpartition(-scores, top_k - 1, axis=2)[..., :top_k]
            found[predictor, distance] += int(np.take_along_axis(uses[:, distance:], likeliest, axis=2).sum())
            routed[predictor, distance] += int(uses[:, distance:].sum())
    return tuple(Recall(name, d, found[name, d] / count, count) for (name, d), count in routed.items())


def _predictions(
    request: TracedRequest, archive: MapArchive, popularity: np.ndarray, distances: Sequence[int]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Predictor, distance, and scores [T, L - distance, J] of the layers that lie so far behind a gate."""
    guidance = archive.search(request, semantic=True)
    recency = _recency(request.uses(archive.maps.shape[2]), popularity)
    layers = len(popularity)
    for distance in distances:
        yield "popularity", distance, np.broadcast_to(popularity[distance:], recency[:, distance:].shape)
        yield "recency", distance, recency[:, distance:]
        if guidance.start[0] >= 0:
            yield "semantic", distance, archive.maps[guidance.start, distance:]
        target = np.arange(distance, layers)
        yield "trajectory", distance, archive.maps[guidance.best[:, : layers - distance], target]


def _recency(uses: np.ndarray, popularity: np.ndarray) -> np.ndarray:
    """Decayed shares [T, L, J] of an expert's uses, as they stand before each iteration of a request."""
    recency = np.empty_like(uses)
    known = popularity
    for iteration, used in enumerate(uses):
        recency[iteration] = known
        known = _DECAY * known + (1 - _DECAY) * used
    return recency

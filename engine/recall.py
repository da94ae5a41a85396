"""How much of what gates choose is predicted, by predictor and distance: what a profile reports of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.map_search import MapArchive
from engine.predictors.features import Features, log_odds
from engine.predictors.fitted import FittedPredictors, TracedBlock, blocks
from engine.predictors.knowledge import Scan
from engine.predictors.request_state import RequestState
from engine.traces import RoutingTrace, TracedRequest

BEFORE = ("popularity", "recency-0.85", "activation-counts", "semantic", "own-semantic", "embedding-ridge")
"""Predictors that are asked before an iteration's first gate; the gates that decide since tell them nothing."""

AHEAD = ("trajectory", "own-trajectory", "gate", "ridge")
"""Predictors that are asked once a gate has decided."""

BEST_SEMANTIC, BEST_TRAJECTORY, MIX = "semantic-best", "trajectory-best", "mix"
"""The paper's searches, which follow the one best map instead of weighing several; and all predictors together."""


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


def measure_recall(predictors: FittedPredictors, test: RoutingTrace, distances: Sequence[int]) -> tuple[Recall, ...]:
    """Recall on decode steps that the predictors were not fitted on.

    All predictors are held to the same layers, those that lie ``distance`` behind a gate, and to all steps of a request
    but its first. Distances beyond the depth of the fit are left out.
    """
    knowledge = predictors.knowledge
    tally = _Tally(knowledge.top_k, [d for d in distances if d <= knowledge.depth])
    for request in test.requests:
        _add_best_maps(tally, knowledge.archive, request)
        state = RequestState(knowledge.popularity)
        earlier: Features = {}
        upcoming = knowledge.popularity[None]
        for block in blocks(request, test.manifest.experts, knowledge.top_k):
            scan = Scan(knowledge, state, len(block.maps))
            for layer in range(len(knowledge.popularity)):
                scan.fill(layer, block.maps[:, layer], block.uses[:, layer])
            scan.advance_to_end()
            read = _read(predictors, block, -1)
            after = scan.following(read)
            following = np.concatenate([upcoming, predictors.upcoming(scan, read)])
            _add_before(tally, earlier, after, block)
            _add_running(tally, predictors, scan, block, following[:-1])
            earlier, upcoming = {name: feature[-1:] for name, feature in after.items()}, following[-1:]
            scan.close()
    return tally.result()


class _Tally:
    """Counts, by predictor and distance, of experts routed and of those among the K likeliest."""

    def __init__(self, top_k: int, distances: Sequence[int]) -> None:
        self.distances = distances
        self._top_k = top_k
        self._found: dict[tuple[str, int], int] = defaultdict(int)
        self._routed: dict[tuple[str, int], int] = defaultdict(int)

    def add(self, predictor: str, distance: int, scores: np.ndarray, uses: np.ndarray) -> None:
        """Scores and uses of the same cases, [..., J]."""
        likeliest = np.argpartition(-scores, self._top_k - 1, axis=-1)[..., : self._top_k]
        self._found[predictor, distance] += int(np.take_along_axis(uses, likeliest, axis=-1).sum())
        self._routed[predictor, distance] += int(uses.sum())

    def add_all(self, predictor: str, scores: np.ndarray, uses: np.ndarray) -> None:
        """Scores and uses [T, L, J] that are the same however far ahead they are told."""
        for distance in self.distances:
            self.add(predictor, distance, scores[:, distance:], uses[:, distance:])

    def result(self) -> tuple[Recall, ...]:
        return tuple(
            Recall(name, distance, self._found[name, distance] / routed, routed)
            for (name, distance), routed in self._routed.items()
            if routed
        )


def _add_best_maps(tally: _Tally, archive: MapArchive, request: TracedRequest) -> None:
    guidance = archive.search(request, semantic=True)
    uses = request.uses(archive.maps.shape[2])[1:]
    layers = uses.shape[1]
    if guidance.start[0] >= 0:
        tally.add_all(BEST_SEMANTIC, archive.maps[guidance.start[1:]], uses)
    for distance in tally.distances:
        followed = archive.maps[guidance.best[1:, : layers - distance], np.arange(distance, layers)]
        tally.add(BEST_TRAJECTORY, distance, followed, uses[:, distance:])


def _add_before(tally: _Tally, earlier: Features, after: Features, block: TracedBlock) -> None:
    """What each iteration of a block, ``earlier`` the one before it, told of the next."""
    for name in BEFORE:
        if name in after:
            known = [earlier[name]] if earlier else []
            scores = np.concatenate([*known, after[name][:-1]])
            tally.add_all(name, scores, block.uses[len(block.uses) - len(scores) :])


def _add_running(
    tally: _Tally, predictors: FittedPredictors, scan: Scan, block: TracedBlock, upcoming: np.ndarray
) -> None:
    """What embeddings and then gates told of the running iterations; ``upcoming`` [B, L, J] was known before."""
    rows = slice(1 if block.rows.start == 0 else 0, None)
    known = predictors.start(scan, upcoming, block.embeddings)
    if block.embeddings is not None and predictors.knowledge.embedding_map is not None:
        for name, scores in scan.start(upcoming, block.embeddings).items():
            if name in BEFORE:
                tally.add_all(name, scores[rows], block.uses[rows])
    prior = log_odds(known)
    for layer in range(len(predictors.knowledge.popularity) - 1):
        read = _read(predictors, block, layer)
        scan.advance(layer)
        told: Features = scan.ahead(layer, prior, read)
        mixed = predictors.ahead(scan, layer, prior, read)
        for distance in (d for d in tally.distances if d <= mixed.shape[1]):
            uses = block.uses[rows, layer + distance]
            tally.add(MIX, distance, mixed[rows, distance - 1], uses)
            for name in AHEAD:
                if name in told:
                    tally.add(name, distance, told[name][rows, distance - 1], uses)


def _read(predictors: FittedPredictors, block: TracedBlock, layer: int) -> np.ndarray | None:
    """What a layer's gate read, [B, H], if the predictors know of it."""
    return block.inputs[:, layer] if block.inputs is not None and predictors.reads_gate_inputs else None

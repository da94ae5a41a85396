"""Table B of the study: which share of the routed experts a predictor names among its K and 2K likeliest."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from engine.predictors.features import log_odds
from engine.predictors.fitted import HIDDEN, FittedPredictors, TracedBlock, blocks
from engine.predictors.fitting import fit_predictors
from engine.predictors.knowledge import Scan
from engine.predictors.request_state import RequestState
from engine.traces import RoutingTrace, TracedRequest
from tests.benchmarks.published import RECALL_AHEAD, RECALL_AT_3, RECALL_BEFORE

DISTANCES = (1, 3, 6)
MAPS = 1000

# The names of predictors, as features and as the study's rows.
BEFORE = {
    "activation-counts": "activation counts (EAM)",
    "popularity": "popularity",
    "previous": "previous token's gates",
    "recency-0.7": "recency .7",
    "recency-0.85": "recency .85",
    "recency-0.93": "recency .93",
    "successors": "successors of stored matches",
    "own-successors": "successors in the request",
    "next-ridge": "next-token ridge",
    "next": "mix before the iteration",
}
START = {
    "best-semantic": "semantic, best map",
    "semantic": "semantic, nearest 32",
    "embedding-ridge": "map of the embedding",
    "start": "mix with the embedding",
}
AHEAD = {
    "best-trajectory": "trajectory, best map",
    "trajectory": "trajectory, nearest 32",
    "own-trajectory": "attention over the request",
    "gate": "later gate, present input",
    "ridge": "ridge from the gate's input",
    "ahead": "mix",
}


class Recall:
    """Experts named among the K and the 2K likeliest, out of all routed ones, by predictor and distance."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._found: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.zeros(2))
        self._routed: dict[tuple[str, int], float] = defaultdict(float)

    def add(self, name: str, distance: int, scores: np.ndarray, uses: np.ndarray) -> None:
        """Scores and uses [..., J] of the same gates."""
        for place, count in enumerate((self._top_k, 2 * self._top_k)):
            likeliest = np.argpartition(-scores, count - 1, axis=-1)[..., :count]
            self._found[name, distance][place] += np.take_along_axis(uses, likeliest, axis=-1).sum()
        self._routed[name, distance] += uses.sum()

    def share(self, name: str, distance: int = 0) -> np.ndarray | None:
        """Recall at K and at 2K; None for a predictor that the trace has no data for."""
        routed = self._routed.get((name, distance))
        return None if routed is None else self._found[name, distance] / routed


def measure_recall(fitted: FittedPredictors, test: RoutingTrace) -> Recall:
    """Recall on the requests of ``test`` by predictors that know another trace."""
    recall = Recall(test.manifest.top_k)
    for request in test.requests:
        _measure_request(fitted, request, recall)
    return recall


def _measure_request(fitted: FittedPredictors, request: TracedRequest, recall: Recall) -> None:
    knowledge = fitted.knowledge
    layers, experts = knowledge.popularity.shape
    uses = request.uses(experts)
    _measure_best_maps(fitted, request, uses, recall)
    state = RequestState(knowledge.popularity)
    before = knowledge.popularity[None]
    for block in blocks(request, experts, knowledge.top_k):
        scan = Scan(knowledge, state, len(block.maps))
        for layer in range(layers):
            scan.fill(layer, block.maps[:, layer], block.uses[:, layer])
        inputs = block.inputs if fitted.reads_gate_inputs else None
        hidden = "" if inputs is None else HIDDEN
        scan.advance_to_end()
        features = dict(scan.following(None if inputs is None else inputs[:, -1]))
        features["next"] = fitted.mixes["next" + hidden](features)
        following = uses[block.rows.start + 1 : block.rows.stop + 1]
        for name in BEFORE.keys() & features.keys():
            recall.add(name, 0, features[name][: len(following)], following)
        known = np.concatenate([before, features["next"][:-1]])
        before = features["next"][-1:]
        if block.embeddings is not None:
            starts = dict(scan.start(known, block.embeddings))
            starts["start"] = known = fitted.mixes["start"](starts)
            for name in START.keys() & starts.keys():
                recall.add(name, 0, starts[name], block.uses)
        _measure_ahead(fitted, scan, block, known, recall)
        scan.close()


def _measure_ahead(fitted: FittedPredictors, scan: Scan, block: TracedBlock, known: np.ndarray, recall: Recall) -> None:
    inputs = block.inputs if fitted.reads_gate_inputs else None
    prior = log_odds(known)
    hidden = "" if inputs is None else HIDDEN
    for layer in range(block.uses.shape[1] - 1):
        scan.advance(layer)
        features = dict(scan.ahead(layer, prior, None if inputs is None else inputs[:, layer]))
        for distance in DISTANCES:
            if distance > features["prior"].shape[1]:
                continue
            here = {name: values[:, distance - 1] for name, values in features.items()}
            here["ahead"] = fitted.mixes[f"ahead-{distance}{hidden}"](here)
            for name in AHEAD.keys() & here.keys():
                recall.add(name, distance, here[name], block.uses[:, layer + distance])


def _measure_best_maps(fitted: FittedPredictors, request: TracedRequest, uses: np.ndarray, recall: Recall) -> None:
    """The paper's searches: the one best map, by embedding and by trajectory."""
    archive = fitted.knowledge.archive
    layers = uses.shape[1]
    guidance = archive.search(request, semantic=True)
    if guidance.start[0] >= 0:
        recall.add("best-semantic", 0, archive.maps[guidance.start], uses)
    for distance in DISTANCES:
        rows = guidance.best[:, : layers - distance]
        recall.add("best-trajectory", distance, archive.maps[rows, np.arange(distance, layers)], uses[:, distance:])


def print_recall(model: str, store: RoutingTrace, test: RoutingTrace) -> None:
    """Fit on the store's side, measure on the tests, and print both halves of the table."""
    recall = measure_recall(fit_predictors(store, maps=MAPS), test)
    print("| known before a gate has decided | K | 2K |\n|---|---|---|")
    for name, row in (BEFORE | START).items():
        here, study = recall.share(name), RECALL_BEFORE[row].get(model)
        if here is not None:
            if study is None:
                study = RECALL_AT_3.get(row, {}).get(model), None
            shown = [_beside(value, study[place]) for place, value in enumerate(here)]
            print(f"| {row} | " + " | ".join(shown) + " |")
    print("\n| by distance, K | " + " | ".join(f"d={d}" for d in DISTANCES) + " |")
    print("|---" * (len(DISTANCES) + 1) + "|")
    for name, row in AHEAD.items():
        shown = []
        for place, distance in enumerate(DISTANCES):
            here, study = recall.share(name, distance), RECALL_AHEAD[row].get(model)
            published = study[place] if study else RECALL_AT_3.get(row, {}).get(model) if distance == 3 else None
            shown.append("-" if here is None else _beside(here[0], published))
        print(f"| {row} | " + " | ".join(shown) + " |")


def _beside(here: float, study: float | None) -> str:
    return f"{here:.3f}/{'-' if study is None else f'{study:.3f}'}"

"""Policies that prefetch what a stored row says: the best-matching expert map, or request-level counts.

Several sequences of a batch share one guidance of a layer: an expert's probability is the largest any of their
matches gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.eviction import EvictionRule
from engine.map_search import ActivationCounts
from engine.observations import ObservedGate, ObservedIteration
from engine.policies import NOT_SEARCHED, NOTHING, LibraryScores, Offers
from engine.records import ExpertMapLibrary, TrajectoryScan
from engine.selection import select_experts, selection_threshold
from engine.transfer_queue import Prefetch


class _RowGuide:
    """Turns one row [L, J] a sequence and its score into prefetches, and tells the rule which rows guide."""

    per_layer = False
    needs_gate_inputs = False

    def __init__(
        self, rule: EvictionRule, layers: int, experts: int, top_k: int, distance: int, by_score: bool
    ) -> None:
        self.rule = rule
        self._layers = layers
        self._experts = experts
        self._top_k = top_k
        self._distance = min(distance, layers)
        self._by_score = by_score
        self._start = 0
        self._guides: list[int] = []

    def _guide(
        self, targets: Iterable[int], names: list[int], rows: Sequence[np.ndarray], scores: Sequence[float]
    ) -> Offers:
        """Prefetches for ``targets`` from rows [L, J], one a sequence, that ``names`` tell apart."""
        if names != self._guides:
            self._guides = names
            merged = rows[0] if len(rows) == 1 else np.maximum.reduce(rows)
            self.rule.record_guidance(merged.reshape(-1))
        chosen: dict[int, Prefetch] = {}
        for row, score in zip(rows, scores, strict=True):
            threshold = selection_threshold(score) if self._by_score else 0.0
            for target in targets:
                distribution = row[target]
                for expert in select_experts(distribution, threshold, self._top_k).tolist():
                    key = target * self._experts + expert
                    probability = float(distribution[expert])
                    if key not in chosen or chosen[key].probability < probability:
                        chosen[key] = Prefetch(key, self._start + target, probability)
        return list(chosen.values())


class MapGuided(_RowGuide):
    """Semantic and trajectory search over a library of expert maps (paper sections 4.2 and 4.3).

    In every iteration each layer is guided once: layers 0..d-1 by the best map for the input's embedding, layer l + d
    by the best map for the gate distributions of layers 0..l.

    Args:
        distance: d.
        semantic: search by embeddings; without it nothing guides the first d layers.
        by_score: take experts until their sum reaches 1 - score (the paper's delta); else just K.
    """

    def __init__(
        self,
        rule: EvictionRule,
        library: ExpertMapLibrary,
        layers: int,
        experts: int,
        top_k: int,
        distance: int,
        semantic: bool = True,
        by_score: bool = True,
    ) -> None:
        super().__init__(rule, layers, experts, top_k, distance, by_score)
        self._library = library
        self._semantic = semantic
        self._scan: TrajectoryScan | None = None
        self._scores: list[np.ndarray | None] = [None, None]

    @property
    def library_scores(self) -> LibraryScores:
        return self._scores[0], self._scores[1]

    def begin(self, iteration: ObservedIteration) -> Offers:
        self._start = iteration.number * self._layers
        self._guides = []
        self._scan = None
        self._scores = [None, None]
        sequences = len(iteration.sequences)
        if not (sequences and len(self._library)):
            return NOTHING
        self._scan = self._library.start_trajectory(sequences)
        if not self._semantic or iteration.embeddings is None:
            return NOTHING
        scores = self._scores[0] = self._library.semantic_scores(iteration.embeddings)
        return self._follow(range(self._distance), scores)

    def observe(self, gate: ObservedGate) -> Offers:
        if self._scan is None:
            return NOTHING
        scores = self._scores[1] = self._scan.observe(gate.probabilities)
        target = gate.layer + self._distance
        return self._follow(range(target, target + 1), scores) if target < self._layers else NOTHING

    def _follow(self, targets: range, scores: np.ndarray) -> Offers:
        best = scores.argmax(axis=1).tolist()
        maps = [self._library.probabilities(row) for row in best]
        return self._guide(targets, best, maps, scores.max(axis=1).tolist())


class CountGuided(_RowGuide):
    """Request-level activation counts: the stored request nearest to what this one has used so far guides it.

    The rule of MoE-Infinity's expert activation matrices, with the K likeliest experts of each layer.
    """

    library_scores = NOT_SEARCHED

    def __init__(
        self, rule: EvictionRule, counts: ActivationCounts, layers: int, experts: int, top_k: int, distance: int
    ) -> None:
        super().__init__(rule, layers, experts, top_k, distance, by_score=False)
        self._counts = counts
        self._used: dict[int, np.ndarray] = {}
        self._sequences: tuple[int, ...] = ()
        self._nearest: list[int] = []

    def begin(self, iteration: ObservedIteration) -> Offers:
        self._start = iteration.number * self._layers
        self._sequences = iteration.sequences
        shape = (self._layers, self._experts)
        used = {n: self._used[n] if n in self._used else np.zeros(shape, np.float32) for n in iteration.sequences}
        known = [counts for counts in used.values() if counts.any()]
        self._nearest = self._counts.nearest(np.stack(known)).tolist() if known else []
        self._used = used
        return self._follow(range(self._distance))

    def observe(self, gate: ObservedGate) -> Offers:
        for place, number in enumerate(self._sequences):
            self._used[number][gate.layer] += gate.uses[place]
        target = gate.layer + self._distance
        return self._follow(range(target, target + 1)) if target < self._layers else NOTHING

    def _follow(self, targets: range) -> Offers:
        if not self._nearest:
            return NOTHING
        rows = [self._counts.rows[row] for row in self._nearest]
        return self._guide(targets, self._nearest, rows, [1.0] * len(rows))

"""Finding the most similar stored maps for a running iteration and turning them into guidance.

The subscriber of the paper's publisher/subscriber design; ``MatcherThread`` runs it beside the token loop.
It knows no thread itself, so that what it decides can be tested step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.families import MoELayer
from engine.observer import Iteration
from engine.records import ExpertMapLibrary, IterationRecord, TrajectoryScan
from engine.selection import select_experts, selection_threshold
from engine.transfer_queue import Prefetch

CONTEXT_DECAY = 0.3
"""What stays of a sequence's earlier embedding at each decode step.

Measured with tests/benchmarks/map_choices.py: of the experts a step routes to in layers 1-3, the best match names
72 % with 0.3, 69 % with the newest token alone, 60 % with 0.7 and 16 % with a plain mean of the context
(mini-qwen1.5-moe; 86, 85, 75 and 36 % for mini-mixtral-8x7b). For a prefill's map the mean of the probabilities,
the share of tokens routed to an expert and their average are within two points of each other (83-85 and 98 %).
"""


class GuidanceSink(Protocol):
    """Who acts on guidance: the transfer engine, or a recorder in tests."""

    def offer(self, prefetches: Sequence[Prefetch]) -> None: ...

    def record_guidance(self, probabilities: np.ndarray) -> None: ...


class Matcher:
    """Semantic and trajectory search over a library of expert maps (paper sections 4.2 and 4.3).

    In every iteration each layer is guided once: layers 0..d-1 by the best map for the input's
    embedding, layer l+d by the best map for the gate distributions of layers 0..l. A prefill becomes
    one map, the mean of its tokens' distributions, and one embedding, the mean of theirs; a decode step's
    embedding mixes its newest token with what went before (``CONTEXT_DECAY``). Several sequences of a
    batch share one guidance of a layer: an expert's probability is the largest any of their matches gives it.
    """

    def __init__(
        self, library: ExpertMapLibrary, layers: Sequence[MoELayer], sink: GuidanceSink, distance: int
    ) -> None:
        self._library = library
        self._sink = sink
        self._layers = len(layers)
        self._distance = min(distance, len(layers))
        self._experts = layers[0].num_experts
        self._top_k = max(layer.top_k for layer in layers)
        self._iteration: Iteration | None = None
        self._contexts: dict[int, np.ndarray] = {}
        self._embeddings = np.empty((0, 0), dtype=np.float32)
        self._observed = np.empty((0, 0, 0), dtype=np.float32)
        self._semantic: np.ndarray | None = None
        self._trajectory: np.ndarray | None = None
        self._scan: TrajectoryScan | None = None
        self._guides: list[int] = []

    def begin(self, iteration: Iteration, embeddings: np.ndarray) -> None:
        """Start an iteration with the embeddings [B, h] of its rows, and guide layers 0..d-1."""
        self._iteration = iteration
        self._embeddings = self._embed(iteration, embeddings)
        batch = len(iteration.sequences)
        self._observed = np.zeros((batch, self._layers, self._experts), dtype=np.float32)
        self._semantic = self._trajectory = self._scan = None
        self._guides = []
        if not (batch and len(self._library)):
            return
        self._semantic = self._library.semantic_scores(self._embeddings)
        self._scan = self._library.start_trajectory(batch)
        self._guide(range(self._distance), self._semantic)

    def observe(self, layer: int, probabilities: np.ndarray) -> None:
        """Add a layer's distributions, one row for each token [B * S, J], and guide layer l+d."""
        if self._iteration is None:
            return
        reduced = reduce_tokens(probabilities, self._iteration)
        self._observed[:, layer] = reduced
        if self._scan is not None:
            self._trajectory = self._scan.observe(reduced)
            target = layer + self._distance
            if target < self._layers:
                self._guide(range(target, target + 1), self._trajectory)
        if layer == self._layers - 1:
            iteration, self._iteration = self._iteration, None
            self._publish(iteration)

    def record(self, iteration: Iteration, embeddings: np.ndarray, probabilities: np.ndarray) -> None:
        """Take a whole iteration at once, without guiding it: embeddings [B, h], distributions [L, B * S, J]."""
        self._embeddings = self._embed(iteration, embeddings)
        self._observed = np.stack([reduce_tokens(layer, iteration) for layer in probabilities], axis=1)
        self._semantic = self._trajectory = None
        self._publish(iteration)

    def _embed(self, iteration: Iteration, embeddings: np.ndarray) -> np.ndarray:
        """Semantic embeddings [sequences, h] of the live rows of the inputs' embeddings [B, h]."""
        contexts = {}
        for state in iteration.sequences:
            newest, earlier = embeddings[state.row], self._contexts.get(state.sequence)
            if state.iteration and earlier is not None:
                newest = CONTEXT_DECAY * earlier + (1 - CONTEXT_DECAY) * newest
            contexts[state.sequence] = newest
        self._contexts = contexts
        return np.array(list(contexts.values()), dtype=np.float32).reshape(len(contexts), -1)

    def _guide(self, targets: range, scores: np.ndarray) -> None:
        """Queue what the best-scoring maps select for ``targets``; scores [B, n] of sequences against maps."""
        assert self._iteration is not None
        start = self._iteration.number * self._layers
        best = scores.argmax(axis=1).tolist()
        maps = [self._library.probabilities(row) for row in best]
        if best != self._guides:
            self._guides = best
            merged = maps[0] if len(maps) == 1 else np.maximum.reduce(maps)
            self._sink.record_guidance(merged.reshape(-1))
        chosen: dict[int, Prefetch] = {}
        for matched, score in zip(maps, scores.max(axis=1).tolist(), strict=True):
            threshold = selection_threshold(score)
            for target in targets:
                row = matched[target]
                for expert in select_experts(row, threshold, self._top_k).tolist():
                    key = target * self._experts + expert
                    probability = float(row[expert])
                    if key not in chosen or chosen[key].probability < probability:
                        chosen[key] = Prefetch(key, start + target, probability)
        self._sink.offer(list(chosen.values()))

    def _publish(self, iteration: Iteration) -> None:
        """Give the iteration's maps back to the library, but for vectors no cosine is defined for."""
        sound = np.isfinite(self._observed).all(axis=(1, 2)) & np.isfinite(self._embeddings).all(axis=1)
        sound &= self._embeddings.any(axis=1)
        rows = np.flatnonzero(sound)
        if not len(rows):
            return
        records = [
            IterationRecord(
                sequence=iteration.sequences[row].sequence,
                iteration=iteration.sequences[row].iteration,
                phase=iteration.phase,
                prompt_hash=iteration.sequences[row].prompt_hash,
                tokens=iteration.sequences[row].tokens,
                embedding=self._embeddings[row],
                probabilities=self._observed[row],
            )
            for row in rows.tolist()
        ]
        scores = [None if s is None else s[rows] for s in (self._semantic, self._trajectory)]
        self._library.publish(records, *scores)


def reduce_tokens(probabilities: np.ndarray, iteration: Iteration) -> np.ndarray:
    """One distribution a sequence: the mean over its live tokens; [B * S, J] -> [len(sequences), J]."""
    if iteration.width == 1:
        if len(iteration.sequences) == iteration.batch:
            return probabilities
        return probabilities[[state.row for state in iteration.sequences]]
    by_row = probabilities.reshape(iteration.batch, iteration.width, -1)
    return np.stack([by_row[s.row, iteration.width - s.tokens :].mean(axis=0) for s in iteration.sequences])


def routed_distribution(ids: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
    """A stand-in where no router is observable: routing weights [T, K] spread over [T, J], rows summing to 1."""
    spread = np.zeros((len(ids), experts), dtype=np.float32)
    np.put_along_axis(spread, ids, np.abs(weights).astype(np.float32), axis=1)
    total = spread.sum(axis=1, keepdims=True)
    return np.divide(spread, total, out=np.full_like(spread, 1.0 / experts), where=total > 0)

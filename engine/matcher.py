"""Finding the most similar stored maps for a running iteration and turning them into guidance.

The subscriber of the paper's publisher/subscriber design. ``Matcher`` is plain and single-threaded, so
that what it decides can be tested step by step; ``MatcherThread`` runs it beside the token loop.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from engine.errors import FinemoeError
from engine.families import MoELayer, to_probabilities
from engine.observer import Iteration
from engine.records import ExpertMapLibrary, IterationRecord, TrajectoryScan
from engine.selection import select_experts, selection_threshold
from engine.transfer_queue import Prefetch


class GuidanceSink(Protocol):
    """Who acts on guidance: the transfer engine, or a recorder in tests."""

    def offer(self, prefetches: Sequence[Prefetch]) -> None: ...

    def record_guidance(self, probabilities: np.ndarray) -> None: ...


class Matcher:
    """Semantic and trajectory search over a library of expert maps (paper sections 4.2 and 4.3).

    In every iteration each layer is guided once: layers 0..d-1 by the best map for the input's
    embedding, layer l+d by the best map for the gate distributions of layers 0..l. A prefill becomes
    one map: the mean of its tokens' distributions. Several sequences of a batch share one guidance of a
    layer: an expert's probability is the largest any of their matches gives it.

    Args:
        guiding: False records iterations without searching, as when every expert is resident anyway.
    """

    def __init__(
        self,
        library: ExpertMapLibrary,
        layers: Sequence[MoELayer],
        sink: GuidanceSink,
        distance: int,
        guiding: bool = True,
    ) -> None:
        self._library = library
        self._layers = layers
        self._sink = sink
        self._distance = min(distance, len(layers))
        self._guiding = guiding
        self._experts = layers[0].num_experts
        self._top_k = max(layer.top_k for layer in layers)
        self._iteration: Iteration | None = None
        self._embeddings = np.empty((0, 0), dtype=np.float32)
        self._observed = np.empty((0, 0, 0), dtype=np.float32)
        self._semantic: np.ndarray | None = None
        self._trajectory: np.ndarray | None = None
        self._scan: TrajectoryScan | None = None

    def begin(self, iteration: Iteration, embeddings: np.ndarray) -> None:
        """Start an iteration with the embeddings [B, h] of its rows, and guide layers 0..d-1."""
        self._iteration = iteration
        self._embeddings = embeddings[[s.row for s in iteration.sequences]]
        batch = len(iteration.sequences)
        self._observed = np.zeros((batch, len(self._layers), self._experts), dtype=np.float32)
        self._semantic = self._trajectory = self._scan = None
        if not (self._guiding and batch and len(self._library)):
            return
        self._semantic = self._library.semantic_scores(self._embeddings)
        self._scan = self._library.start_trajectory(batch)
        self._guide(range(self._distance), self._semantic, now=-1)

    def observe(self, layer: int, probabilities: np.ndarray) -> None:
        """Add a layer's distributions, one row for each token [B * S, J], and guide layer l+d."""
        if self._iteration is None:
            return
        self._observed[:, layer] = reduce_tokens(probabilities, self._iteration)
        if self._scan is not None:
            self._trajectory = self._scan.observe(self._observed[:, layer])
            target = layer + self._distance
            if target < len(self._layers):
                self._guide(range(target, target + 1), self._trajectory, now=layer)
        if layer == len(self._layers) - 1:
            self._finish()

    def _guide(self, targets: range, scores: np.ndarray, now: int) -> None:
        """Queue what the best-scoring maps select for ``targets``; scores [B, n] of sequences against maps."""
        assert self._iteration is not None
        start = self._iteration.number * len(self._layers)
        merged = np.zeros((len(self._layers), self._experts), dtype=np.float32)
        chosen: dict[int, Prefetch] = {}
        for row in scores:
            best = int(np.argmax(row))
            matched = self._library.probabilities(best)
            np.maximum(merged, matched, out=merged)
            threshold = selection_threshold(float(row[best]))
            for target in targets:
                for expert in select_experts(matched[target], threshold, self._top_k).tolist():
                    key = target * self._experts + expert
                    probability = max(float(matched[target, expert]), chosen[key].probability if key in chosen else 0.0)
                    chosen[key] = Prefetch(key, start + target, probability)
        self._sink.record_guidance(merged.reshape(-1))
        self._sink.offer(list(chosen.values()))

    def _finish(self) -> None:
        """Give the iteration's maps back to the library."""
        iteration, self._iteration = self._iteration, None
        assert iteration is not None
        if not iteration.sequences:
            return
        records = [
            IterationRecord(
                sequence=state.sequence,
                iteration=state.iteration,
                phase=iteration.phase,
                prompt_hash=state.prompt_hash,
                tokens=state.tokens,
                embedding=self._embeddings[i],
                probabilities=self._observed[i],
            )
            for i, state in enumerate(iteration.sequences)
        ]
        self._library.publish(records, self._semantic, self._trajectory)


def reduce_tokens(probabilities: np.ndarray, iteration: Iteration) -> np.ndarray:
    """One distribution a sequence: the mean over its live tokens; [B * S, J] -> [len(sequences), J]."""
    if iteration.width == 1:
        return probabilities[[state.row for state in iteration.sequences]]
    by_row = probabilities.reshape(iteration.batch, iteration.width, -1)
    return np.stack([by_row[s.row, iteration.width - s.tokens :].mean(axis=0) for s in iteration.sequences])


def routed_distribution(ids: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
    """A stand-in where no router is observable: routing weights [T, K] spread over [T, J], rows summing to 1."""
    spread = np.zeros((len(ids), experts), dtype=np.float32)
    np.put_along_axis(spread, ids, np.abs(weights).astype(np.float32), axis=1)
    total = spread.sum(axis=1, keepdims=True)
    return np.divide(spread, total, out=np.full_like(spread, 1.0 / experts), where=total > 0)


class MatcherThread:
    """Runs a ``Matcher`` beside the token loop; the observer's ``Subscriber``.

    Publishing appends to a queue. What the matcher raises is raised again by the next ``drain`` or
    ``check``: a search that failed must not go unseen, though no token depends on it.
    """

    def __init__(self, matcher: Matcher, layers: Sequence[MoELayer]) -> None:
        self._matcher = matcher
        self._layers = layers
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="finemoe-matcher", daemon=True)
        self._thread.start()

    def begin(self, iteration: Iteration, embeddings: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        def handle() -> None:
            if arrived is not None:
                arrived.synchronize()
            self._matcher.begin(iteration, embeddings.numpy())

        self._events.put(handle)

    def decide(self, layer: int, scores: torch.Tensor | None, ids: np.ndarray, weights: torch.Tensor) -> None:
        def handle() -> None:
            if scores is None:
                spread = weights.float().cpu().numpy()
                self._matcher.observe(layer, routed_distribution(ids, spread, self._layers[layer].num_experts))
            else:
                self._matcher.observe(layer, to_probabilities(self._layers[layer], scores).numpy())

        self._events.put(handle)

    def drain(self) -> None:
        """Wait until everything published so far has been handled."""
        done = threading.Event()
        self._events.put(done.set)
        done.wait()
        self.check()

    def check(self) -> None:
        """Raise what the matcher failed with, once."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if isinstance(failure, FinemoeError):
            raise failure
        raise RuntimeError("the expert-map matcher failed") from failure

    def close(self) -> None:
        """Handle what is queued, then stop; idempotent."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (handle := self._events.get()) is not None:
            try:
                handle()
            except BaseException as failure:  # kept for ``check``; the thread goes on serving drains
                self._failure = failure

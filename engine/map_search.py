"""Guidance for whole requests at once: what the searches of paper section 4.2 find at every layer.

Everything here is computed for all iterations of a request in a few matrix products, as a replay needs it. Row t, layer
l of a result depends on nothing that is unknown once gate l of iteration t has decided; tests shuffle the future to
hold it to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.traces import RoutingTrace, TracedRequest

_TINY = 1e-12
# Iterations searched together: their products with a thousand maps stay in a core's cache.
_BLOCK = 32


@dataclass(frozen=True, slots=True, eq=False)
class Guidance:
    """Which stored row guides what, for the T iterations of a request.

    Attributes:
        rows: float32 [n, L, J], what is known: stored maps or activation counts.
        start: int [T], the row that guides layers 0..d-1 of an iteration; -1 for none.
        start_scores: float [T], its score.
        best: int [T, L], the row found once gate l has decided, which guides layer l + d; -1 for none.
        scores: float [T, L], its score.
    """

    rows: np.ndarray
    start: np.ndarray
    start_scores: np.ndarray
    best: np.ndarray
    scores: np.ndarray

    def by_target(self, distance: int) -> tuple[np.ndarray, np.ndarray]:
        """The row [T, L] that guides each layer, and its score: each layer once (the boundary is layer d)."""
        distance = min(distance, self.best.shape[1])
        first = [np.repeat(a[:, None], distance, axis=1) for a in (self.start, self.start_scores)]
        later = [a[:, : a.shape[1] - distance] for a in (self.best, self.scores)]
        rows, scores = (np.concatenate(pair, axis=1) for pair in zip(first, later, strict=True))
        return rows, scores


class MapArchive:
    """Stored expert maps float32 [n, L, J]; what was used in their iterations and in those that followed, likewise.

    Also whose they are, [n], and their embeddings [n, h], if known. The study found maps kept by redundancy no better
    than an even choice (FINDINGS, finding 3).

    Attributes:
        by_layer: [L, J, n], the maps as searches read them.
        inverse_norms: [L, n], of the maps up to each layer.
        embeddings: of length 1.
    """

    def __init__(
        self,
        maps: np.ndarray,
        uses: np.ndarray,
        following: np.ndarray,
        owners: np.ndarray,
        embeddings: np.ndarray | None,
    ) -> None:
        self.maps = maps
        self.uses = uses
        self.following = following
        self.owners = owners
        self.embeddings = None if embeddings is None else _normalized(embeddings)
        self.by_layer = np.ascontiguousarray(maps.transpose(1, 2, 0))
        self.inverse_norms = 1.0 / (np.sqrt(np.square(self.by_layer).sum(axis=1).cumsum(axis=0)) + _TINY)

    @classmethod
    def of(cls, trace: RoutingTrace, capacity: int) -> MapArchive:
        """The decode steps of a trace, at most ``capacity``, evenly taken."""
        decode = trace.decode_only()
        experts = trace.manifest.experts
        total = decode.iterations
        chosen = np.unique(np.linspace(0, total - 1, min(capacity, total)).round().astype(np.int64))
        maps, embeddings, uses, following, owners = [], [], [], [], []
        first = 0
        for request in decode.requests:
            mine = chosen[(chosen >= first) & (chosen < first + len(request))] - first
            first += len(request)
            if not len(mine):
                continue
            part = request.take(mine)
            maps.append(part.maps(experts))
            used = request.uses(experts)
            uses.append(used[mine])
            # Nothing follows a request's last step: it stands for itself.
            following.append(used[np.minimum(mine + 1, len(request) - 1)])
            owners.append(np.full(len(mine), request.request))
            if part.embeddings is not None:
                embeddings.append(part.embeddings)
        return cls(
            np.concatenate(maps),
            np.concatenate(uses),
            np.concatenate(following),
            np.concatenate(owners),
            np.concatenate(embeddings) if embeddings else None,
        )

    def __len__(self) -> int:
        return len(self.maps)

    def prefix_cosines(self, maps: np.ndarray) -> Iterator[np.ndarray]:
        """For each layer the cosines [T, n] of maps [T, L, J] up to it with the stored ones; one array, used again."""
        inverse = 1.0 / (np.sqrt(np.square(maps).sum(axis=2).cumsum(axis=1)) + _TINY)
        products = np.zeros((len(maps), len(self)), dtype=np.float32)
        scratch = np.empty_like(products)
        for layer in range(maps.shape[1]):
            products += np.matmul(maps[:, layer], self.by_layer[layer], out=scratch)
            np.multiply(products, self.inverse_norms[layer], out=scratch)
            scratch *= inverse[:, layer, None]
            yield scratch

    def search(self, request: TracedRequest, semantic: bool) -> Guidance:
        """The most similar map at the start (by embedding, if both sides have one) and after every gate."""
        maps = request.maps(self.maps.shape[2])
        iterations, layers, _ = maps.shape
        best = np.empty((iterations, layers), dtype=np.int64)
        scores = np.empty((iterations, layers), dtype=np.float32)
        for first in range(0, iterations, _BLOCK):
            block = slice(first, first + _BLOCK)
            for layer, cosines in enumerate(self.prefix_cosines(maps[block])):
                found = cosines.argmax(axis=1)
                best[block, layer] = found
                scores[block, layer] = np.take_along_axis(cosines, found[:, None], axis=1)[:, 0]
        start = np.full(iterations, -1, dtype=np.int64)
        start_scores = np.zeros(iterations, dtype=np.float32)
        if semantic and self.embeddings is not None and request.embeddings is not None:
            cosines = _normalized(request.embeddings) @ self.embeddings.T
            start = cosines.argmax(axis=1)
            start_scores = cosines.max(axis=1)
        return Guidance(self.maps, start, start_scores, best, scores)


class ActivationCounts:
    """Request-level counts of uses (the expert activation matrices of MoE-Infinity), one matrix a stored request.

    Args:
        matrices: float32 [n, L, J].
        owners: int [n], the requests' numbers.
    """

    def __init__(self, matrices: np.ndarray, owners: np.ndarray) -> None:
        self.matrices = matrices
        self.owners = owners
        self.rows = matrices / matrices.sum(axis=2, keepdims=True)
        self._flat = _normalized(matrices.reshape(len(matrices), -1))

    @classmethod
    def of(cls, trace: RoutingTrace) -> ActivationCounts:
        """Those of a trace's requests."""
        experts = trace.manifest.experts
        owners = np.array([request.request for request in trace.requests])
        return cls(np.stack([request.uses(experts).sum(axis=0) for request in trace.requests]), owners)

    def nearest(self, counts: np.ndarray, excluded: int | None = None) -> np.ndarray:
        """Index [S] of the stored request nearest to each of these counts [S, L, J], but for one request's."""
        cosines = _normalized(counts.reshape(len(counts), -1)) @ self._flat.T
        if excluded is not None:
            cosines[:, self.owners == excluded] = -1.0
        return cosines.argmax(axis=1)

    def search(self, request: TracedRequest) -> Guidance:
        """The request nearest to what this one has used before each iteration; nothing guides its first one."""
        uses = request.uses(self.rows.shape[2])
        iterations, layers, _ = uses.shape
        before = (uses.cumsum(axis=0) - uses).reshape(iterations, -1)
        cosines = _normalized(before) @ self._flat.T
        start = np.where(before.any(axis=1), cosines.argmax(axis=1), -1)
        scores = np.where(start >= 0, cosines.max(axis=1), 0.0)
        return Guidance(
            self.rows,
            start,
            scores,
            np.repeat(start[:, None], layers, axis=1),
            np.repeat(scores[:, None], layers, axis=1),
        )


def _normalized(rows: np.ndarray) -> np.ndarray:
    return rows / (np.linalg.norm(rows, axis=1, keepdims=True) + _TINY)

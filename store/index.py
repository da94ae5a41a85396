"""The resident search index: every stored map in memory, searched by matrix products (paper section 4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from engine.errors import UsageError
from engine.records import IterationRecord
from store.rows import MapRows, round_records

DEFAULT_CAPACITY = 1000
DEFAULT_DISTANCE = 3

_FIRST_ALLOCATION = 256
_SEARCHES_IN_FLIGHT = 16
_TRIM_BATCH = 32
_FILL_BATCH = 4096

Rows = slice | np.ndarray


class ResidentIndex:
    """Expert maps of one model, at most ``capacity`` of them; implements ``engine.records.ExpertMapLibrary``.

    Maps are kept as float32 [L, C, J], so that a trajectory search reads one contiguous block a layer, with
    the norm of every prefix P_1..P_l beside them. Memory grows with the maps held, not with the capacity.

    Args:
        layers: L.
        experts: J.
        hidden_size: h.
        capacity: C, the most maps held; one more replaces the most redundant (paper section 4.4).
        distance: d, the prefetch distance that weighs the redundancy; no more than L counts.

    Raises:
        UsageError: capacity or distance is below 1.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        hidden_size: int,
        capacity: int = DEFAULT_CAPACITY,
        distance: int = DEFAULT_DISTANCE,
    ) -> None:
        if capacity < 1 or distance < 1:
            raise UsageError(f"capacity {capacity} and prefetch distance {distance} must both be at least 1")
        self.layers = layers
        self.experts = experts
        self.hidden_size = hidden_size
        self.capacity = capacity
        self.distance = min(distance, layers)
        self._keys: list[str] = []
        self._row_of: dict[str, int] = {}
        self._arrivals = 0
        self._generation = 0
        self._searches: deque[int] = deque(maxlen=_SEARCHES_IN_FLIGHT)
        self._maps = np.empty((layers, 0, experts), np.float32)
        self._inverse_norms = np.empty((layers, 0), np.float32)
        self._embeddings = np.empty((0, hidden_size), np.float32)
        self._written = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of every row, in row order."""
        return tuple(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes of memory the arrays take."""
        return sum(array.nbytes for array in (self._maps, self._inverse_norms, self._embeddings, self._written))

    def row_of(self, key: str) -> int | None:
        return self._row_of.get(key)

    def probabilities(self, row: int) -> np.ndarray:
        """The stored map of one row, float32 [L, J]; read-only, valid until the next insertion."""
        view = self._maps[:, : len(self)][:, row]
        view.flags.writeable = False
        return view

    def semantic_scores(self, embeddings: np.ndarray) -> np.ndarray:
        """Cosine [B, n] of embeddings [B, h] with every stored one (paper equation 4); zero scores 0."""
        self._searches.append(self._generation)
        return self._semantic(embeddings, slice(len(self)))

    def start_trajectory(self, batch: int) -> PrefixScan:
        """Begin a trajectory search for ``batch`` sequences over the maps present now."""
        self._searches.append(self._generation)
        return PrefixScan(self, batch)

    def publish(
        self,
        records: Sequence[IterationRecord],
        semantic_scores: np.ndarray | None = None,
        trajectory_scores: np.ndarray | None = None,
    ) -> None:
        """Insert finished iterations under keys of their own; see ``insert`` for the scores.

        Raises:
            InvalidMapError: a record is zero, not finite or of the wrong shape; none is inserted.
        """
        keys = [str(self._arrivals + offset) for offset in range(len(records))]
        rows = round_records(records, keys, self.layers, self.experts, self.hidden_size)
        self._arrivals += len(records)
        self.insert(rows, semantic_scores, trajectory_scores)

    def insert(
        self,
        rows: MapRows,
        semantic_scores: np.ndarray | None = None,
        trajectory_scores: np.ndarray | None = None,
    ) -> list[str | None]:
        """Take m new maps; once full, each replaces the stored map of the highest redundancy.

        A key that is present already is written over in its row. No newcomer takes the place of another one
        of the same call, as long as the call has no more maps than the index.

        Args:
            rows: the newcomers.
            semantic_scores: [m, n], their cosines from ``semantic_scores`` of this index.
            trajectory_scores: [m, n], cosines of their whole maps from a scan of this index. Rows beyond n or
                written since are scored anew, if no more than eight iterations are in flight at once.

        Returns:
            for each newcomer the key of the map it replaced, or None.
        """
        if len(rows) > self.capacity:
            parts = [slice(i, i + self.capacity) for i in range(0, len(rows), self.capacity)]
            scores = [[None if s is None else s[part] for s in (semantic_scores, trajectory_scores)] for part in parts]
            return [key for part, given in zip(parts, scores, strict=True) for key in self.insert(rows[part], *given)]

        self._generation += 1
        present = len(self)
        targets = np.empty(len(rows), np.intp)
        replaced: list[str | None] = [None] * len(rows)
        redundancy: np.ndarray | None = None
        for i, key in enumerate(rows.keys):
            row = self._row_of.get(key)
            if row is None and len(self) < self.capacity:
                row = len(self)
                self._keys.append(key)
            elif row is None:
                if redundancy is None:
                    redundancy = self._redundancy(rows, present, semantic_scores, trajectory_scores)
                    redundancy[:, targets[:i][targets[:i] < present]] = -np.inf
                row = int(redundancy[i].argmax())
                replaced[i] = self._keys[row]
                del self._row_of[self._keys[row]]
                self._keys[row] = key
            self._row_of[key] = row
            targets[i] = row
            if redundancy is not None and row < present:
                redundancy[:, row] = -np.inf
        self._write(targets, rows)
        return replaced

    def fill(self, rows: MapRows) -> list[str]:
        """Insert any number of maps, as if they came a few at a time; return the keys that found no place."""
        displaced: list[str] = []
        start = 0
        while start < len(rows):
            free = self.capacity - len(self)
            stop = start + (min(free, _FILL_BATCH) or min(_TRIM_BATCH, self.capacity))
            displaced += [key for key in self.insert(rows[start:stop]) if key is not None]
            start = stop
        return displaced

    def nearest_other(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Highest cosine of each stored row [m] with another one: (semantic [m], whole trajectory [m])."""
        everything = slice(len(self))
        own = (np.arange(len(rows)), rows)
        semantic = self._semantic(self._embeddings[rows], everything)
        trajectory = self._trajectory(self._maps[:, rows], everything)
        semantic[own] = trajectory[own] = -np.inf
        return semantic.max(axis=1), trajectory.max(axis=1)

    def _semantic(self, embeddings: np.ndarray, rows: Rows) -> np.ndarray:
        queries = np.asarray(embeddings, np.float32)
        lengths = np.linalg.norm(queries.astype(np.float64), axis=1)
        return ((self._embeddings[rows] @ queries.T) * _inverse(lengths)).T

    def _trajectory(self, maps: np.ndarray, rows: Rows) -> np.ndarray:
        """Cosine [m, r] of whole maps [L, m, J] with the stored rows."""
        dots = sum(self._maps[layer, rows] @ maps[layer].T for layer in range(self.layers))
        lengths = np.sqrt(np.square(maps, dtype=np.float64).sum(axis=(0, 2)))
        return (dots * self._inverse_norms[-1, rows][:, None]).T * _inverse(lengths)[:, None]

    def _redundancy(
        self,
        rows: MapRows,
        present: int,
        semantic_scores: np.ndarray | None,
        trajectory_scores: np.ndarray | None,
    ) -> np.ndarray:
        """RDY [m, present] of the newcomers with the maps stored before them (paper section 4.4)."""
        embeddings = rows.embeddings.astype(np.float32)
        maps = rows.maps.transpose(1, 0, 2).astype(np.float32)
        semantic = self._complete(semantic_scores, present, lambda stale: self._semantic(embeddings, stale))
        trajectory = self._complete(trajectory_scores, present, lambda stale: self._trajectory(maps, stale))
        weight = self.distance / self.layers
        return weight * semantic + (1 - weight) * trajectory

    def _complete(self, given: np.ndarray | None, present: int, score: Callable[[Rows], np.ndarray]) -> np.ndarray:
        """Scores of every row: those ``given``, except for rows that changed since their search began."""
        if given is None or not self._searches:
            return score(slice(present))
        known = given.shape[1]
        changed = self._written[:present] > self._searches[0]
        changed[known:] = True
        stale = np.flatnonzero(changed)
        scores = np.empty((len(given), present), np.float32)
        scores[:, :known] = given
        scores[:, stale] = score(stale)
        return scores

    def _write(self, targets: np.ndarray, rows: MapRows) -> None:
        self._reserve(len(self))
        maps = rows.maps.transpose(1, 0, 2).astype(np.float32)
        squares = np.square(maps, dtype=np.float64).sum(axis=2)
        embeddings = rows.embeddings.astype(np.float32)
        self._maps[:, targets] = maps
        self._inverse_norms[:, targets] = _inverse(np.sqrt(squares.cumsum(axis=0)))
        self._embeddings[targets] = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
        self._written[targets] = self._generation

    def _reserve(self, rows: int) -> None:
        allocated = len(self._written)
        if rows <= allocated:
            return
        size = min(self.capacity, max(rows, 2 * allocated, _FIRST_ALLOCATION))
        for name, axis in (("_maps", 1), ("_inverse_norms", 1), ("_embeddings", 0), ("_written", 0)):
            old = getattr(self, name)
            shape = list(old.shape)
            shape[axis] = size
            grown = np.empty(shape, old.dtype)
            grown[(slice(None),) * axis + (slice(allocated),)] = old
            setattr(self, name, grown)


class PrefixScan:
    """The trajectory search of one iteration: dot products and norms of the prefix, grown layer by layer."""

    def __init__(self, index: ResidentIndex, batch: int) -> None:
        self._index = index
        self._generation = index._generation
        self._observed: list[np.ndarray] = []
        self._dots = np.zeros((len(index), batch), np.float32)
        self._squares = np.zeros(batch)

    def observe(self, probabilities: np.ndarray) -> np.ndarray:
        """Add the next layer's gate distributions [B, J]; return cosines [B, n] of the prefix so far.

        A row that has been written over since the last layer is scored with the map it holds now.

        Raises:
            ValueError: more layers are observed than the maps have.
        """
        index = self._index
        layer = len(self._observed)
        if layer == index.layers:
            raise ValueError(f"the maps have {index.layers} layers only")
        if self._generation != index._generation:
            self._catch_up()
        rows = len(self._dots)
        layer_probabilities = np.asarray(probabilities, np.float32)
        self._observed.append(layer_probabilities)
        if len(layer_probabilities) == 1:
            # One sequence is the common case and a layer is short: a product with a vector, and few calls.
            query = layer_probabilities[0]
            self._dots[:, 0] += index._maps[layer, :rows].dot(query)
            self._squares[0] += query.dot(query)
            length = float(self._squares[0]) ** 0.5
            return (self._dots[:, 0] * index._inverse_norms[layer, :rows] * (1 / length if length else 0.0))[None]
        self._dots += index._maps[layer, :rows] @ layer_probabilities.T
        self._squares += np.einsum("bj,bj->b", layer_probabilities, layer_probabilities)
        scores = self._dots * index._inverse_norms[layer, :rows, None]
        scores *= _inverse(np.sqrt(self._squares))
        return scores.T

    def _catch_up(self) -> None:
        changed = np.flatnonzero(self._index._written[: len(self._dots)] > self._generation)
        self._dots[changed] = 0
        for layer, observed in enumerate(self._observed):
            self._dots[changed] += self._index._maps[layer, changed] @ observed.T
        self._generation = self._index._generation


def _inverse(lengths: np.ndarray) -> np.ndarray:
    """1 / lengths as float32, and 0 where a length is 0, so that zero vectors score 0."""
    return np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0).astype(np.float32)

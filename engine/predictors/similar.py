"""Attention over iterations like the running one: those of the store, and the earlier ones of the same request.

The store's are found as the paper finds maps (section 4.2): by the embedding before the first gate has decided, by the
trajectory afterwards. Instead of the best map alone, the nearest ones are weighed by their similarity.
"""

from __future__ import annotations

import numpy as np

from engine.map_search import MapArchive
from engine.predictors.features import Features, log_share
from engine.predictors.request_state import FLOOR, WINDOW, RequestState

NEIGHBOURS = 32
"""Stored iterations that have a say; the study found no more than 32 useful (FINDINGS, table B)."""

FOLDS = 16
"""Archives of a multiple of it are searched fastest, see ``nearest``."""

# Keeps the sum of weights positive where all neighbours are equally near.
_LEAST = 1e-4


class Similar:
    """The iterations like each of B consecutive ones of a request, whose first follows the complete ones.

    Args:
        archive: stored iterations; None for a request that is alone.
        sharpness: how fast weights fall with the cosine.
        prior: cosine at which popularity speaks in place of the request's earlier iterations.
        excluded: a request whose stored iterations do not count: that which is being fitted.
    """

    def __init__(
        self,
        archive: MapArchive,
        popularity: np.ndarray,
        state: RequestState,
        block: int,
        sharpness: float,
        prior: float,
        excluded: int | None,
    ) -> None:
        self._archive = archive
        self._popularity = popularity
        self._state = state
        self._sharpness = np.float32(sharpness)
        self._prior = prior
        self._rows = slice(state.count, state.count + block)
        self._keys = state.count + block - 1
        place = np.arange(state.count, state.count + block)[:, None] - np.arange(self._keys)
        self._hidden = (place <= 0) | (place > WINDOW)
        self._absent = None if excluded is None else archive.owners == excluded
        self._restart()

    def _restart(self) -> None:
        block = self._rows.stop - self._rows.start
        self._own_products = np.zeros((block, self._keys), dtype=np.float32)
        self._products = np.zeros((block, len(self._archive)), dtype=np.float32)

    def start(self) -> Features:
        """What iterations of like embeddings used, [B, L, J]."""
        embeddings = self._state.embeddings
        assert embeddings is not None and self._archive.embeddings is not None
        normed = embeddings[: self._rows.stop]
        normed = normed / (np.linalg.norm(normed, axis=1, keepdims=True) + FLOOR)
        queries = normed[self._rows]
        self._weigh_stored(queries @ self._archive.embeddings.T)
        self._weigh_own(queries @ normed[: self._keys].T)
        everything = slice(0, len(self._popularity))
        return self._named("semantic", self._stored(self._archive.uses, everything), self._own_uses(everything))

    def advance(self, layer: int) -> None:
        """Gate ``layer`` has decided: weigh by the trajectory up to it."""
        if layer == 0:
            self._restart()
        maps = self._state.maps
        queries = maps[self._rows, layer]
        self._own_products += queries @ maps[: self._keys, layer].T
        self._products += queries @ self._archive.by_layer[layer]
        self._weigh(layer)

    def advance_to_end(self) -> None:
        """Weigh by whole maps; where every layer of the block is known beforehand."""
        layers = len(self._popularity)
        maps = self._state.maps.reshape(len(self._state.maps), -1)
        queries = maps[self._rows]
        self._own_products = queries @ maps[: self._keys].T
        self._products = queries @ self._archive.by_layer.reshape(maps.shape[1], -1)
        self._weigh(layers - 1)

    def ahead(self, first: int, stop: int) -> Features:
        """What the iterations weighed last used in layers ``first`` to ``stop``, [B, stop - first, J]."""
        layers = slice(first, stop)
        return self._named("trajectory", self._stored(self._archive.uses, layers), self._own_uses(layers))

    def following(self, first: int, stop: int) -> Features:
        """What was used in the iterations that followed them, [B, stop - first, J]."""
        layers = slice(first, stop)
        followed = self._state.uses[1 : self._keys + 1, layers]
        return self._named("successors", self._stored(self._archive.following, layers), self._attend(followed, layers))

    def _named(self, name: str, stored: np.ndarray, own: np.ndarray) -> Features:
        return {name: log_share(stored), f"own-{name}": log_share(own)}

    def _weigh(self, layer: int) -> None:
        inverse = self._state.inverse_norms[: self._rows.stop, layer]
        self._weigh_own(self._own_products * inverse[: self._keys] * inverse[self._rows, None])
        self._weigh_stored(self._products * self._archive.inverse_norms[layer] * inverse[self._rows, None])

    def _weigh_own(self, cosines: np.ndarray) -> None:
        """Weights [B, 1 + keys]: of popularity, and of the request's earlier iterations."""
        scores = np.empty((len(cosines), 1 + self._keys), dtype=np.float32)
        scores[:, 0] = self._prior
        scores[:, 1:] = np.where(self._hidden, -np.inf, cosines)
        weights = np.exp(self._sharpness * (scores - scores.max(axis=1, keepdims=True)))
        self._own = weights / weights.sum(axis=1, keepdims=True)

    def _weigh_stored(self, cosines: np.ndarray) -> None:
        """The nearest stored iterations and their weights [B, n], which fall to nothing at the last of them."""
        if self._absent is not None:
            cosines = np.where(self._absent, -1.0, cosines)
        self._nearest = nearest(cosines, min(NEIGHBOURS, cosines.shape[1]))
        near = cosines[np.arange(len(cosines))[:, None], self._nearest]
        weights = np.exp(self._sharpness * (near - near.max(axis=1, keepdims=True)))
        # A neighbour that rounding exchanges for another must not matter.
        weights += _LEAST - weights.min(axis=1, keepdims=True)
        self._weights = weights / weights.sum(axis=1, keepdims=True)

    def _stored(self, what: np.ndarray, layers: slice) -> np.ndarray:
        experts = self._popularity.shape[1]
        columns = slice(layers.start * experts, layers.stop * experts)
        found = what.reshape(len(what), -1)[:, columns][self._nearest]
        return np.matmul(self._weights[:, None], found).reshape(len(found), -1, experts)

    def _own_uses(self, layers: slice) -> np.ndarray:
        return self._attend(self._state.uses[: self._keys, layers], layers)

    def _attend(self, what: np.ndarray, layers: slice) -> np.ndarray:
        popularity = self._popularity[layers].reshape(1, -1)
        seen = self._own[:, 1:] @ what.reshape(self._keys, popularity.shape[1]) + self._own[:, :1] * popularity
        return seen.reshape(len(seen), -1, self._popularity.shape[1])


def nearest(cosines: np.ndarray, count: int) -> np.ndarray:
    """Columns [B, count] of the largest cosines [B, n] of each row, in no order."""
    rows, columns = cosines.shape
    width, spare = divmod(columns, FOLDS)
    if spare or width <= count:
        return cosines.argpartition(-count, axis=1)[:, -count:]
    # The largest lie in the groups of the largest maxima, and maxima are quickly found.
    folded = cosines.reshape(rows, FOLDS, width)
    groups = folded.max(axis=1).argpartition(-count, axis=1)[:, -count:]
    candidates = (groups[:, None] + width * np.arange(FOLDS)[:, None]).reshape(rows, -1)
    row = np.arange(rows)[:, None]
    return candidates[row, cosines[row, candidates].argpartition(-count, axis=1)[:, -count:]]

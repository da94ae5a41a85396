"""What one request has shown so far: the part of a predictor's knowledge that no store holds."""

from __future__ import annotations

import numpy as np

WINDOW = 256
"""Iterations of the same request that attention looks back on; older ones are forgotten, so that memory is bounded."""

BLOCK = 128
"""Iterations predicted together at most."""

FLOOR = 0.01
"""Added to norms, so that nothing divides by zero."""

DECAYS = np.array([0.5, 0.7, 0.85, 0.93, 0.98], dtype=np.float32)


class RequestState:
    """Buffers of the newest iterations, and sums over all of them.

    Attributes:
        maps, uses: float32 [rows, L, J]; the first ``count`` hold complete iterations, oldest first.
        inverse_norms: float32 [rows, L], of the maps up to each layer.
        embeddings: float32 [rows, h], or None.
        recencies: float32 [len(DECAYS), L, J], decayed shares of uses, before the next iteration.
        totals: float32 [L, J], uses of all iterations.
        upcoming: float32 [L, J], the probability of use in the next iteration; None before it was ever estimated.
    """

    def __init__(self, popularity: np.ndarray) -> None:
        layers, experts = popularity.shape
        rows = WINDOW + BLOCK
        self.count = 0
        self.maps = np.zeros((rows, layers, experts), dtype=np.float32)
        self.uses = np.zeros((rows, layers, experts), dtype=np.float32)
        self._squares = np.zeros((rows, layers), dtype=np.float32)
        self.inverse_norms = np.zeros((rows, layers), dtype=np.float32)
        self.embeddings: np.ndarray | None = None
        self.recencies = np.repeat(popularity[None].astype(np.float32), len(DECAYS), axis=0)
        self.totals = np.zeros((layers, experts), dtype=np.float32)
        self.upcoming: np.ndarray | None = None

    def make_room(self, block: int) -> None:
        """Forget the oldest iterations, if need be, so that ``block`` more fit; at most ``BLOCK``."""
        if self.count + block <= len(self.maps):
            return
        kept = slice(self.count - WINDOW, self.count)
        for buffer in (self.maps, self.uses, self.inverse_norms, self.embeddings):
            if buffer is not None:
                buffer[:WINDOW] = buffer[kept].copy()
        self.count = WINDOW

    def fill(self, rows: slice, layer: int, maps: np.ndarray, uses: np.ndarray) -> None:
        """Keep a layer's distributions and uses [B, J] of these iterations, after those of the layers before."""
        self.maps[rows, layer] = maps
        self.uses[rows, layer] = uses
        squares = np.square(maps).sum(axis=1)
        if layer:
            squares += self._squares[rows, layer - 1]
        self._squares[rows, layer] = squares
        self.inverse_norms[rows, layer] = 1.0 / np.sqrt(squares + FLOOR**2)

    def embed(self, embeddings: np.ndarray) -> None:
        """Keep the embeddings [B, h] of the iterations that follow the complete ones."""
        if self.embeddings is None:
            self.embeddings = np.zeros((len(self.maps), embeddings.shape[1]), dtype=np.float32)
        self.embeddings[self.count : self.count + len(embeddings)] = embeddings

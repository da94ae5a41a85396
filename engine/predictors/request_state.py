"""What one request has shown so far: the part of a predictor's knowledge that no store holds."""

from __future__ import annotations

import numpy as np

WINDOW = 256
"""Iterations of the same request that attention looks back on; older ones are forgotten, so that memory is bounded."""

BLOCK = 128
"""Iterations predicted together at most."""

DECAYS = np.array([0.5, 0.7, 0.85, 0.93, 0.98], dtype=np.float32)


class RequestState:
    """Buffers of the newest iterations, and sums over all of them.

    Attributes:
        maps, uses: float32 [rows, L, J]; the first ``count`` hold complete iterations, oldest first.
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
        self.embeddings: np.ndarray | None = None
        self.recencies = np.repeat(popularity[None].astype(np.float32), len(DECAYS), axis=0)
        self.totals = np.zeros((layers, experts), dtype=np.float32)
        self.upcoming: np.ndarray | None = None

    def make_room(self, block: int) -> None:
        """Forget the oldest iterations, if need be, so that ``block`` more fit; at most ``BLOCK``."""
        if self.count + block <= len(self.maps):
            return
        kept = slice(self.count - WINDOW, self.count)
        for buffer in (self.maps, self.uses, self.embeddings):
            if buffer is not None:
                buffer[:WINDOW] = buffer[kept].copy()
        self.count = WINDOW

    def embed(self, embeddings: np.ndarray) -> None:
        """Keep the embeddings [B, h] of the iterations that follow the complete ones."""
        if self.embeddings is None:
            self.embeddings = np.zeros((len(self.maps), embeddings.shape[1]), dtype=np.float32)
        self.embeddings[self.count : self.count + len(embeddings)] = embeddings

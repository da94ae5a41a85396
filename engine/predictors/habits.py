"""What is used often: by everyone, by requests like this one, by this request lately, and by its last token."""

from __future__ import annotations

import numpy as np

from engine.map_search import ActivationCounts
from engine.predictors.features import Features, log_share, map_logits, margins
from engine.predictors.request_state import DECAYS, RequestState

RECENCIES = tuple(f"recency-{decay:g}" for decay in DECAYS)


class Habits:
    """Frequencies as they stand before each of B consecutive iterations of a request, and after the last one.

    Args:
        popularity: float32 [L, J], the share of iterations that use an expert.
        top_k: K.
        counts: uses by stored requests (MoE-Infinity's expert activation matrices).
        excluded: a request whose stored counts do not count.
    """

    def __init__(
        self,
        popularity: np.ndarray,
        top_k: int,
        counts: ActivationCounts,
        state: RequestState,
        block: int,
        excluded: int | None,
    ) -> None:
        self._popularity = popularity
        self._top_k = top_k
        self._counts = counts
        self._state = state
        self._excluded = excluded
        self._rows = slice(state.count, state.count + block)
        self._recencies = np.empty((block + 1, *state.recencies.shape), dtype=np.float32)
        self._recencies[0] = state.recencies
        self._totals = np.empty((block + 1, *popularity.shape), dtype=np.float32)
        self._totals[0] = state.totals

    def fill(self, layer: int) -> None:
        """Gate ``layer`` has decided in all iterations of the block."""
        uses = self._state.uses[self._rows, layer]
        decays = DECAYS[:, None]
        for row, used in enumerate(uses):
            self._recencies[row + 1, :, layer] = decays * self._recencies[row, :, layer] + (1 - decays) * used
        self._totals[1:, layer] = self._totals[0, layer] + uses.cumsum(axis=0)

    def close(self) -> None:
        """The block is complete: the request goes on from its last iteration."""
        self._state.recencies = self._recencies[-1]
        self._state.totals = self._totals[-1]

    def after(self, first: int, stop: int) -> Features:
        """Of layers ``first`` to ``stop``, once their gates have decided: [B, stop - first, J]."""
        layers = slice(first, stop)
        recencies = log_share(self._recencies[1:, :, layers])
        features = {name: recencies[:, i] for i, name in enumerate(RECENCIES)}
        maps = self._state.maps[self._rows, layers]
        features["previous"] = log_share(maps)
        features["previous-margin"] = margins(map_logits(maps), self._top_k)
        features["popularity"] = log_share(np.repeat(self._popularity[None, layers], len(maps), axis=0))
        return features

    def like_requests(self) -> Features:
        """What the stored request nearest to this one used, after each iteration: [B, L, J]."""
        return {
            "activation-counts": log_share(self._counts.rows[self._counts.nearest(self._totals[1:], self._excluded)])
        }

"""Cases drawn at random from scanned requests, on which mixes are fitted and judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from engine.predictors.features import Features
from engine.predictors.mix import Mix, fit_mix


class RowSample:
    """Rows of features and outcomes by moment; the same ones from run to run."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._features: dict[str, list[dict[str, np.ndarray]]] = defaultdict(list)
        self._outcomes: dict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, moment: str, features: Features, outcome: np.ndarray, count: int) -> None:
        """Draw at most so many of the cases that features and outcome, all of one shape, stand for."""
        if not outcome.size:
            return
        pick = self._rng.integers(0, outcome.size, min(count, outcome.size))
        self._features[moment].append({name: f.reshape(-1)[pick] for name, f in features.items()})
        self._outcomes[moment].append(outcome.reshape(-1)[pick])

    @property
    def moments(self) -> Iterable[str]:
        return self._features

    def rows(self, moment: str) -> dict[str, np.ndarray]:
        """Features [N] by name."""
        parts = self._features[moment]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def outcome(self, moment: str) -> np.ndarray:
        """[N], what came of them."""
        return np.concatenate(self._outcomes[moment])

    def fit(self, moment: str, names: Sequence[str]) -> Mix:
        return fit_mix(names, self.rows(moment), self.outcome(moment))

"""Refitting mixes on line: cases of the running requests, drawn as they go by, move the weights that a store gave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from engine.predictors.features import Features
from engine.predictors.mix import Mix, fit_mix

ROWS = 8192
"""Recent cases that are kept of each moment."""

REFIT_AFTER = 64
"""Iterations between two refits, each at the beginning of a request."""

_STORE_CASES = 4096
_FEWEST = 512


class MixLessons:
    """Cases of what mixes were told and what came of it, and the mixes that follow from them.

    A refit goes from the store's weights towards those that fit the recent cases alone: n / (n + 4096) of the way with
    n cases.

    Attributes:
        mixes: the current ones, by moment.
    """

    def __init__(self, mixes: Mapping[str, Mix], layers: int, experts: int) -> None:
        self.mixes = dict(mixes)
        self._first = dict(mixes)
        self._layers = layers
        self._experts = experts
        self._cases: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._iterations = self._refitted = 0

    def take_iterations(self, count: int) -> int:
        """Number the iterations that are about to run: the first one's number."""
        first, self._iterations = self._iterations, self._iterations + count
        return first

    def refit(self) -> None:
        """Move the weights, if enough has happened since they last were."""
        if self._iterations < self._refitted + REFIT_AFTER:
            return
        self._refitted = self._iterations
        for moment, (rows, happened) in self._cases.items():
            known = ~np.isnan(happened)
            cases = int(known.sum())
            if cases < _FEWEST:
                continue
            first = self._first[moment]
            recent = fit_mix(first.names, dict(zip(first.names, rows[known].T, strict=True)), happened[known])
            share = np.float32(cases / (cases + _STORE_CASES))
            self.mixes[moment] = Mix(first.names, first.weights + share * (recent.weights - first.weights))

    def draw(self, numbers: np.ndarray, layer: int) -> np.ndarray:
        """The expert [B] of a layer whose case is kept for each of B iterations; any, and the same in every run."""
        return (numbers * 7919 + layer * 104_729 + numbers // self._experts * 31) % self._experts

    def keep(self, moment: str, numbers: np.ndarray, layer: int, rows: np.ndarray, happened: np.ndarray) -> None:
        """Cases of one layer in B iterations: features [B, F] and what came of them [B]."""
        if moment not in self._cases:
            shape = (ROWS, rows.shape[1])
            self._cases[moment] = np.zeros(shape, dtype=np.float32), np.full(ROWS, np.nan, dtype=np.float32)
        place = (numbers * self._layers + layer) % ROWS
        kept, outcomes = self._cases[moment]
        kept[place] = rows
        outcomes[place] = happened


class RequestLessons:
    """The cases of one request, until what came of them is known."""

    def __init__(self, lessons: MixLessons) -> None:
        self._lessons = lessons
        self._waiting: dict[int, list[tuple[str, np.ndarray, np.ndarray]]] = defaultdict(list)
        self._numbers = np.empty(0, dtype=np.int64)

    def begin(self, count: int) -> None:
        """So many iterations begin together."""
        first = self._lessons.take_iterations(count)
        self._numbers = np.arange(first, first + count)

    def note(self, mix: Mix, moment: str, layer: int, features: Features) -> None:
        """What a mix was told of a layer of each iteration, features [B, J]."""
        drawn = self._lessons.draw(self._numbers, layer)
        rows = np.stack([features[name][np.arange(len(drawn)), drawn] for name in mix.names], axis=1)
        self._waiting[layer].append((moment, drawn, rows))

    def settle(self, layer: int, uses: np.ndarray) -> None:
        """The layer's gates have decided: uses [B, J]."""
        for moment, drawn, rows in self._waiting.pop(layer, ()):
            happened = uses[np.arange(len(drawn)), drawn]
            self._lessons.keep(moment, self._numbers, layer, rows, happened)

"""Refitting mixes on line: cases of the running requests, drawn as they go by, move the weights that a store gave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

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

    def draw(self, numbers: np.ndarray) -> np.ndarray:
        """The expert [L, B] of each layer whose case is kept for each of B iterations; any, the same in every run."""
        layers = np.arange(self._layers)[:, None]
        return (numbers * 7919 + layers * 104_729 + numbers // self._experts * 31) % self._experts

    def keep(
        self, moment: str, numbers: np.ndarray, layers: np.ndarray, rows: np.ndarray, happened: np.ndarray
    ) -> None:
        """Cases of n layers in B iterations: features [n, B, F] and what came of them [n, B]."""
        if moment not in self._cases:
            shape = (ROWS, rows.shape[2])
            self._cases[moment] = np.zeros(shape, dtype=np.float32), np.full(ROWS, np.nan, dtype=np.float32)
        places = (numbers * self._layers + layers[:, None]) % ROWS
        kept, outcomes = self._cases[moment]
        kept[places] = rows
        outcomes[places] = happened


class RequestLessons:
    """The cases of one request, until what came of them is known."""

    def __init__(self, lessons: MixLessons) -> None:
        self._lessons = lessons
        self._waiting: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        self._numbers = np.empty(0, dtype=np.int64)
        self._drawn = self._layers = self._iterations = np.empty((0, 0), dtype=np.int64)

    def begin(self, count: int) -> None:
        """So many iterations begin together."""
        first = self._lessons.take_iterations(count)
        self._numbers = np.arange(first, first + count)
        self._drawn = self._lessons.draw(self._numbers)
        self._layers, self._iterations = np.ogrid[: len(self._drawn), :count]
        self._waiting.clear()

    def note(self, moments: Sequence[str], first: int, stack: np.ndarray) -> None:
        """What mixes were told, features [F, B, n, J], of n layers from ``first`` on, each in a moment of its own."""
        drawn = self._drawn[first : first + stack.shape[2]]
        rows = stack.transpose(2, 1, 3, 0)[self._layers[: len(drawn)], self._iterations, drawn]
        for layer, (moment, row) in enumerate(zip(moments, rows, strict=True), first):
            self._waiting[moment][layer] = row

    def settle(self, uses: np.ndarray) -> None:
        """The iterations are complete: their uses [B, L, J]."""
        happened = uses[self._iterations, self._layers, self._drawn]
        for moment, noted in self._waiting.items():
            layers = np.array(list(noted))
            self._lessons.keep(moment, self._numbers, layers, np.array(list(noted.values())), happened[layers])

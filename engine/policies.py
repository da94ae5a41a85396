"""What engines and replays ask of a policy, and the policies that need nothing but a rule, a search, or the future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine.eviction import EvictionRule
from engine.map_search import Guidance
from engine.observations import ObservedGate, ObservedIteration
from engine.selection import select_many
from engine.traces import TracedRequest
from engine.transfer_queue import Prefetch

NOTHING: tuple[Prefetch, ...] = ()
Offers = Sequence[Prefetch]

LibraryScores = tuple[np.ndarray | None, np.ndarray | None]
"""Cosines [S, n] of S sequences with a library's maps, by embedding and by trajectory; None where none was sought."""

NOT_SEARCHED: LibraryScores = (None, None)


class Policy(Protocol):
    """A predictor with its selection, which offers prefetches, and an eviction rule, told event by event.

    Attributes:
        per_layer: the cache is divided evenly among the layers.
        needs_gate_inputs: gates are to be observed with their inputs.
    """

    rule: EvictionRule
    per_layer: bool
    needs_gate_inputs: bool

    @property
    def library_scores(self) -> LibraryScores:
        """What the searches of the iteration just observed ended with, to spare the library a second one."""
        ...

    def begin(self, iteration: ObservedIteration) -> Offers:
        """What to prefetch before the first gate of an iteration has decided."""
        ...

    def observe(self, gate: ObservedGate) -> Offers:
        """What to prefetch once a gate has decided."""
        ...


class PreparedPolicy(Protocol):
    """A policy in the form of fast replays: handed a whole request, it predicts in few large operations.

    What it answers for an iteration and layer must not depend on anything later.
    """

    rule: EvictionRule
    per_layer: bool

    def begin_request(self, request: TracedRequest, position: int) -> None:
        """A request whose first layer has this position, counted in layers since the replay began."""
        ...

    def begin_iteration(self, iteration: int) -> Offers:
        """What to prefetch before the first gate of an iteration has decided."""
        ...

    def observe(self, iteration: int, layer: int) -> Offers:
        """What to prefetch once a gate has decided."""
        ...


class OnDemand:
    """Loads what a gate has decided, nothing else; with one cache for all layers or a share for each."""

    needs_gate_inputs = False
    library_scores = NOT_SEARCHED

    def __init__(self, rule: EvictionRule, per_layer: bool = False) -> None:
        self.rule = rule
        self.per_layer = per_layer

    def begin(self, iteration: ObservedIteration) -> Offers:
        return NOTHING

    def observe(self, gate: ObservedGate) -> Offers:
        return NOTHING


class PreparedOnDemand:
    """The same for replays."""

    def __init__(self, rule: EvictionRule, per_layer: bool = False) -> None:
        self.rule = rule
        self.per_layer = per_layer

    def begin_request(self, request: TracedRequest, position: int) -> None:
        """No request is like another."""

    def begin_iteration(self, iteration: int) -> Offers:
        return NOTHING

    def observe(self, iteration: int, layer: int) -> Offers:
        return NOTHING


class Guided:
    """Prefetches what a stored row selects: the start's for the first d layers, after gate l for layer l + d.

    Args:
        search: finds the rows for a request.
        distance: d; L has the start guide every layer.
        top_k: K, the experts taken at least.
        by_score: take experts until their sum reaches 1 - score (the paper's delta); else just K.
    """

    per_layer = False

    def __init__(
        self,
        rule: EvictionRule,
        search: Callable[[TracedRequest], Guidance],
        distance: int,
        top_k: int,
        by_score: bool,
    ) -> None:
        self.rule = rule
        self._search = search
        self._distance = distance
        self._top_k = top_k
        self._by_score = by_score
        self._offers: list[list[Offers]] = []
        self._guides: list[list[int]] = []
        self._rows = np.empty((0, 0), dtype=np.float32)
        self._guide = -1

    def begin_request(self, request: TracedRequest, position: int) -> None:
        guidance = self._search(request)
        self._rows = guidance.rows.reshape(len(guidance.rows), -1)
        self._guides = np.concatenate([guidance.start[:, None], guidance.best], axis=1).tolist()
        self._guide = -1
        self._offers = self._select(guidance, position)

    def begin_iteration(self, iteration: int) -> Offers:
        self._follow(self._guides[iteration][0])
        return [offer for target in self._offers[iteration][: self._distance] for offer in target]

    def observe(self, iteration: int, layer: int) -> Offers:
        self._follow(self._guides[iteration][layer + 1])
        target = layer + self._distance
        offers = self._offers[iteration]
        return offers[target] if target < len(offers) else NOTHING

    def _follow(self, guide: int) -> None:
        if guide >= 0 and guide != self._guide:
            self._guide = guide
            self.rule.record_guidance(self._rows[guide])

    def _select(self, guidance: Guidance, position: int) -> list[list[Offers]]:
        """The prefetches for each layer of each iteration."""
        rows, scores = guidance.by_target(self._distance)
        iterations, layers = rows.shape
        guided = rows.reshape(-1) >= 0
        target = np.tile(np.arange(layers), iterations)
        distributions = guidance.rows[rows.reshape(-1), target]
        thresholds = np.clip(1.0 - scores.reshape(-1), 0.0, 1.0) if self._by_score else np.zeros(rows.size)
        selected = select_many(distributions, thresholds, self._top_k)
        experts = distributions.shape[1]
        flat: list[Offers] = []
        for i, (ids, known) in enumerate(zip(selected, guided.tolist(), strict=True)):
            if not known:
                flat.append(NOTHING)
                continue
            base = i % layers * experts
            likely = distributions[i, ids].tolist()
            flat.append([Prefetch(base + e, position + i, p) for e, p in zip(ids, likely, strict=True)])
        return [flat[t * layers : (t + 1) * layers] for t in range(iterations)]

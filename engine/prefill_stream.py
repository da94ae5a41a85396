"""Streaming experts through a few slots while an iteration of many tokens goes from layer to layer.

Such an iteration uses nearly all experts of a layer, and each layer once. So the order in which experts are needed is
known, and whatever a layer has computed is not needed again before the next iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.bounds import NextUse
from engine.eviction import EvictionRule
from engine.expected_use import ExpectedUse

LEAST_USE = 0.5
"""Expected share of experts in use from which an iteration streams, and expected use from which an expert is sent
ahead. Than 0.25, it moves 1 % more bytes in prefills of mini-qwen1.5-moe, and 0.75 moves 3-11 % more than it."""

RING_SHARE = 8
"""A stream runs ahead through one slot in so many; 4 and 16 are no different where the link is the bottleneck."""

PRIOR_TOKENS = 32.0
"""Tokens that an estimate counts for beside the tokens seen."""

HISTORY_KEPT = 0.5
"""What earlier iterations count for in the next estimate."""

_LEFT_OVER, _WITH_LEFT_OVERS, _STREAMED = 2.0, 3.0, 4.0


@dataclass(frozen=True, slots=True)
class StreamedLoad:
    """What is to cross the link next.

    Attributes:
        key: flat expert key.
        worth: nothing of more worth, in the stream's values, may make room for it.
        decided: the gate of the running layer has decided for it.
    """

    key: int
    worth: float
    decided: bool


class PrefillStream:
    """The order of a stream, and the eviction rule of its cache for the time it runs.

    Decided experts of the running layer come first, then those of the layers ahead, layer by layer, by falling
    expected use ``1 - (1 - p)^T``. p is learnt from the iterations that streamed before.

    Room is made by experts of layers that have passed, the running one among them as soon as they are computed, by
    rising share of this iteration's tokens, or by what they are worth to a rule that expects uses itself. So what
    stays behind is what decoding will use most, of all layers. Experts that are there when the iteration begins stay
    until their layer has come, but for the ring: one slot in ``RING_SHARE`` that is given up, furthest layers first,
    or the link would wait for every product. No more than the ring is sent ahead.

    Not locked: its owner holds one lock around every call. Values are worth, in three bands: shares of tokens (0 to
    1), experts left over from before (2 to 3) and experts sent ahead (4).

    Args:
        rule: the policy's own, which is told of everything and decides again when the stream has ended.
        slots: experts the cache has room for.
    """

    def __init__(self, rule: EvictionRule, layers: int, experts: int, top_k: int, slots: int) -> None:
        self._rule = rule
        self._asks_rule = isinstance(rule, ExpectedUse)
        self._layers = layers
        self._experts = experts
        self._share = min(top_k / experts, 1.0)
        self._ring = max(1, min(experts, slots // RING_SHARE))
        self._most_left = slots - self._ring
        self._routed = np.zeros((layers, experts))
        self._seen = np.zeros((layers, 1))
        self._values = np.zeros(layers * experts)
        furthest_first = _LEFT_OVER + (layers - 1 - np.arange(layers)) / layers
        self._left_values = np.repeat(furthest_first, experts)
        self._decided: deque[int] = deque()
        self._ahead: deque[int] = deque()
        self._left = np.zeros(layers, dtype=np.int64)
        self._sent = np.zeros(layers, dtype=np.int64)
        self._tokens = 0
        self._now = layers
        self.awaited: int | None = None

    def begin(self, tokens: int, held: Callable[[], list[int]]) -> bool:
        """Whether an iteration of so many tokens streams; if so, it begins.

        Args:
            held: tells the experts that hold or await a slot.
        """
        # Uneven routing uses fewer experts than even routing does.
        if tokens == 1 or 1.0 - (1.0 - self._share) ** tokens < LEAST_USE:
            return False
        use = 1.0 - (1.0 - np.minimum(self._estimate(self._routed, self._seen, self._share), 1.0)) ** tokens
        if use.mean() < LEAST_USE:
            return False
        order = (-use).argsort(axis=1, kind="stable")
        keys = order + np.arange(self._layers)[:, None] * self._experts
        self._ahead = deque(keys[np.take_along_axis(use, order, axis=1) >= LEAST_USE].tolist())
        self._decided.clear()
        self._tokens, self._now, self.awaited = tokens, -1, None
        self._values[:] = self._left_values
        self._left[:] = np.bincount([key // self._experts for key in held()], minlength=self._layers)
        self._sent[:] = 0
        return True

    def decide(self, counts: Mapping[int, int], absent: Sequence[int]) -> None:
        """The gate of the next layer has decided.

        Args:
            counts: how many tokens, padding left out, are routed to each expert, by key.
            absent: experts that the layer computes and that neither hold nor await a slot, in the order of their use.
        """
        self._now += 1
        layer = self._now
        self._left[layer] = self._sent[layer] = 0
        while self._ahead and self._ahead[0] // self._experts <= layer:
            self._ahead.popleft()
        routed = np.zeros(self._experts)
        routed[[key % self._experts for key in counts]] = list(counts.values())
        history = self._estimate(self._routed[layer], self._seen[layer], self._share)
        first = layer * self._experts
        self._values[first : first + self._experts] = self._estimate(routed, self._tokens, history)
        self._routed[layer] = HISTORY_KEPT * self._routed[layer] + routed
        self._seen[layer] = HISTORY_KEPT * self._seen[layer] + self._tokens
        self._decided = deque(absent)

    def next_load(self, holds: Callable[[int], bool]) -> StreamedLoad | None:
        """What is to be sent now.

        Args:
            holds: whether an expert holds or awaits a slot.
        """
        worth = _WITH_LEFT_OVERS if self._left.sum() > self._most_left else _LEFT_OVER - 1.0
        while self._decided:
            key = self._decided[0]
            if not holds(key):
                # The layer stands still for it: whatever can leave has to.
                return StreamedLoad(key, np.inf if key == self.awaited else worth, decided=True)
            self._decided.popleft()
        if self._sent.sum() >= self._ring:
            return None
        while self._ahead:
            key = self._ahead[0]
            if not holds(key):
                return StreamedLoad(key, worth, decided=False)
            self._ahead.popleft()
        return None

    def end_layer(self) -> None:
        """Nothing more is sent for the running layer: it is done, or left."""
        self._decided.clear()
        self.awaited = None

    def abandon(self) -> None:
        """Nothing is sent any more: the iteration has ended, or is left."""
        self.end_layer()
        self._ahead.clear()

    def record_use(self, keys: Sequence[int]) -> None:
        self._rule.record_use(keys)

    def record_guidance(self, probabilities: np.ndarray) -> None:
        self._rule.record_guidance(probabilities)

    def record_load(self, key: int) -> None:
        self._rule.record_load(key)
        layer = key // self._experts
        if layer > self._now:
            self._sent[layer] += 1
            self._values[key] = _STREAMED

    def record_eviction(self, key: int) -> None:
        self._rule.record_eviction(key)
        layer = key // self._experts
        if layer > self._now:
            kind = self._sent if self._values[key] == _STREAMED else self._left
            kind[layer] -= 1

    def values(self, keys: np.ndarray) -> np.ndarray:
        values = self._values[keys]
        if self._asks_rule:
            passed = values < _LEFT_OVER
            # A rule that falls back on recency has values beyond 1: the least recent use decides then.
            values[passed] = np.minimum(self._rule.values(keys)[passed], 1.0)
        return values

    def speculative_value(self, key: int, probability: float) -> float:
        return self._rule.speculative_value(key, probability)

    def _estimate(self, routed: np.ndarray, tokens: np.ndarray | float, prior: np.ndarray | float) -> np.ndarray:
        """The share of tokens routed to each expert, from counts of so many tokens and an earlier estimate."""
        return (routed + PRIOR_TOKENS * prior) / (tokens + PRIOR_TOKENS)


def open_stream(rule: EvictionRule, layers: int, experts: int, top_k: int, slots: int) -> PrefillStream | None:
    """A stream for a cache; None for one whose rule knows the future, which no estimate may take the place of."""
    if isinstance(rule, NextUse):
        return None
    return PrefillStream(rule, layers, experts, top_k, slots)

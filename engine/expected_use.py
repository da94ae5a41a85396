"""What experts are worth: the eviction rule of ``adaptive``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BYTES_ALLOWED = 1.03
"""Loads, as a multiple of those of LRU in the same room, from which on nothing more is fetched ahead."""

MOST_SAVED = 64.0
"""Loads that can be caught up with later at most: what was spared long ago is no reason to fetch more now."""

DEBT, DEBT_LEFT = 12.0, 6.0
"""Loads beyond the allowed from which on recency decides what is evicted, and from which on expected use does again:
where it learnt from is too unlike what it meets."""


def missing_rest(values: np.ndarray, upcoming: np.ndarray) -> np.ndarray:
    """What the rest of values lacks of 1, where a value is p + (1 - p) * rest and p is ``upcoming``."""
    return np.minimum((1.0 - values) / np.maximum(1.0 - upcoming, 1e-6), 1.0)


def raise_values(values: np.ndarray, upcoming: np.ndarray, missing: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Values once the next visit's probability turns out to be ``known``, if that is more than ``upcoming``.

    A value is p + (1 - p) * rest; p rises, the rest stays, of which 1 - rest is ``missing``. Lower probabilities change
    nothing: what an expert is worth after this token is known worse than that, and lowering lost time in the study
    (FINDINGS, finding 8).
    """
    return np.where(known > upcoming, 1.0 - (1.0 - known) * missing, values)


class ExpectedUse:
    """Evict the expert of the lowest expected discounted next use; where that loads more than LRU would, be LRU.

    Attributes:
        worth: float32 [L, J], expected discount by whole iterations, from the next visit on; the policy keeps it.
        absent: by key, whether the expert holds no room.

    Args:
        discount: what an expert loses of its worth with each iteration; a layer's share of it for each layer.
        price: what an absent expert must be worth more than the one it takes the place of, if nobody waits for it: the
            transfer it takes, on the scale on which a transfer spared at once is 1.
        capacity: experts there is room for, to know what recency would have loaded; None leaves that out.
    """

    def __init__(
        self, layers: int, experts: int, discount: float, price: float = 0.0, capacity: int | None = None
    ) -> None:
        now, layer = np.arange(-1, layers)[:, None], np.arange(layers)
        distance = np.where(layer > now, layer - now, layers + layer - now)
        self._discounts = np.repeat(discount ** (distance / layers), experts, axis=1).astype(np.float32)
        self._discount = self._discounts[0]
        self.worth = np.zeros((layers, experts), dtype=np.float32)
        self._flat = self.worth.reshape(-1)
        self.absent = [True] * (layers * experts)
        self._price = price
        self._allowance = 0.0
        self._recency = None if capacity is None else ShadowRecency(capacity)
        self._last_use = np.zeros(layers * experts, dtype=np.float64)
        self._clock = 0
        self._in_debt = False

    @property
    def has_allowance(self) -> bool:
        """Whether the link may be used for more than what gates have decided, see ``BYTES_ALLOWED``."""
        return self._recency is None or self._allowance >= 1.0

    def move(self, layer: int) -> None:
        """The gate of ``layer`` has decided; -1 for the beginning of an iteration."""
        self._discount = self._discounts[layer + 1]

    def record_use(self, keys: Sequence[int]) -> None:
        if self._recency is None:
            return
        self._allowance = min(self._allowance + BYTES_ALLOWED * self._recency.use(keys), MOST_SAVED)
        self._in_debt = self._allowance < -(DEBT_LEFT if self._in_debt else DEBT)
        self._clock += 1
        self._last_use[keys] = self._clock

    def record_guidance(self, probabilities: np.ndarray) -> None:
        """The policy sets what experts are worth."""

    def record_load(self, key: int) -> None:
        self.absent[key] = False
        self._allowance -= 1.0

    def record_eviction(self, key: int) -> None:
        self.absent[key] = True

    def values(self, keys: np.ndarray) -> np.ndarray:
        if self._in_debt:
            return self._last_use[keys]
        worth = self._discount[keys] * self._flat[keys]
        if self._price and len(keys) == 1 and self.absent[keys[0]]:
            worth = worth - self._price
        return worth

    def speculative_value(self, key: int, probability: float) -> float:
        if self._in_debt:
            return -1.0
        return float(self._discount[key] * self._flat[key]) - self._price


class ShadowRecency:
    """An LRU cache that holds nothing: it tells what it would have missed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[int, None] = {}

    def use(self, keys: Sequence[int]) -> int:
        """Misses among the experts of a layer, each named once."""
        held = self._held
        misses = 0
        for key in keys:
            if key in held:
                del held[key]
            else:
                misses += 1
            held[key] = None
        while len(held) > self._capacity:
            del held[next(iter(held))]
        return misses

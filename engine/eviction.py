"""Which resident expert makes room: rules by name, all over flat expert keys ``layer * J + expert``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

_LAST = 1e15


class EvictionRule(Protocol):
    """Values resident experts; the lowest value is evicted first.

    Uses, loads and evictions are recorded under the lock of the cache. Guidance comes from the policy's own thread and
    may be read half written: it moves a choice between experts, never a result.
    """

    def record_use(self, keys: Sequence[int]) -> None:
        """These experts were routed in the layer that runs now, each named once."""
        ...

    def record_guidance(self, probabilities: np.ndarray) -> None:
        """The matched map(s) of the running iteration, flattened to [L * J]."""
        ...

    def record_load(self, key: int) -> None:
        """The expert has been given a slot."""
        ...

    def record_eviction(self, key: int) -> None:
        """The expert has lost its slot."""
        ...

    def values(self, keys: np.ndarray) -> np.ndarray:
        """What keeping each expert is worth, finite, in a new array [n]; ties are broken by the least recent use."""
        ...

    def speculative_value(self, key: int, probability: float) -> float:
        """What loading an expert ahead of its gate's decision is worth, on the scale of ``values``."""
        ...


class LeastRecentlyUsed:
    """Evict the expert whose last use or load lies furthest back; speculation has no value it could compare."""

    def __init__(self, num_keys: int) -> None:
        self._last_use = np.zeros(num_keys, dtype=np.int64)
        self._clock = 0

    def record_use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.record_load(key)

    def record_guidance(self, probabilities: np.ndarray) -> None:
        """Recency alone decides."""

    def record_load(self, key: int) -> None:
        self._clock += 1
        self._last_use[key] = self._clock

    def record_eviction(self, key: int) -> None:
        """Recency alone decides."""

    def values(self, keys: np.ndarray) -> np.ndarray:
        return self._last_use[keys].astype(np.float64)

    def speculative_value(self, key: int, probability: float) -> float:
        return float("inf")


class FirstInFirstOut:
    """Evict the expert that came first, used since or not; speculation has no value it could compare."""

    def __init__(self, num_keys: int) -> None:
        # Whoever comes next comes last.
        self._arrival = np.full(num_keys, _LAST)
        self._clock = 0

    def record_use(self, keys: Sequence[int]) -> None:
        """Arrival alone decides."""

    def record_guidance(self, probabilities: np.ndarray) -> None:
        """Arrival alone decides."""

    def record_load(self, key: int) -> None:
        self._clock += 1
        self._arrival[key] = self._clock

    def record_eviction(self, key: int) -> None:
        self._arrival[key] = _LAST

    def values(self, keys: np.ndarray) -> np.ndarray:
        return self._arrival[keys]

    def speculative_value(self, key: int, probability: float) -> float:
        return float("inf")


class LeastFrequentlyUsed:
    """Evict the expert routed least often since the engine started; speculation is worth its own count."""

    def __init__(self, num_keys: int) -> None:
        self._frequency = np.zeros(num_keys, dtype=np.float64)

    def record_use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._frequency[key] += 1

    def record_guidance(self, probabilities: np.ndarray) -> None:
        """Frequency alone decides."""

    def record_load(self, key: int) -> None:
        """A load is no use."""

    def record_eviction(self, key: int) -> None:
        """An expert's frequency outlives its slot."""

    def values(self, keys: np.ndarray) -> np.ndarray:
        return self._frequency[keys]

    def speculative_value(self, key: int, probability: float) -> float:
        return float(self._frequency[key])


class ProbabilityFrequency:
    """The paper's rule: eviction priority ``1 / (p * freq)``, highest goes first (section 4.4).

    p is the expert's probability in the map matched last, freq how often it was routed. Kept as the
    value ``p * freq``, which orders the same way and has no infinity at p = 0. freq starts at one, or
    nothing prefetched could ever stay.

    Args:
        while_cached: count freq anew whenever the expert loses its slot, instead of since the engine
            started. The paper does not say which.
    """

    def __init__(self, num_keys: int, while_cached: bool = False) -> None:
        self._while_cached = while_cached
        self._frequency = np.ones(num_keys, dtype=np.float64)
        self._probability = np.zeros(num_keys, dtype=np.float64)

    def record_use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._frequency[key] += 1

    def record_guidance(self, probabilities: np.ndarray) -> None:
        self._probability[:] = probabilities

    def record_load(self, key: int) -> None:
        """A load is no use."""

    def record_eviction(self, key: int) -> None:
        if self._while_cached:
            self._frequency[key] = 1

    def values(self, keys: np.ndarray) -> np.ndarray:
        return self._probability[keys] * self._frequency[keys]

    def speculative_value(self, key: int, probability: float) -> float:
        return probability * float(self._frequency[key])

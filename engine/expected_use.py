"""What experts are worth: the eviction rule of ``adaptive``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def raise_values(values: np.ndarray, upcoming: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Values once the next visit's probability turns out to be ``known``, if that is more than ``upcoming``.

    A value is p + (1 - p) * rest; p rises, the rest stays. Lower probabilities change nothing: what an expert is worth
    after this token is known worse than that, and lowering lost time in the study (FINDINGS, finding 8).
    """
    left_out = (1.0 - values) / np.maximum(1.0 - upcoming, 1e-6)
    return np.where(known > upcoming, 1.0 - (1.0 - known) * np.minimum(left_out, 1.0), values)


class ExpectedUse:
    """Evict the expert of the lowest expected discounted next use.

    Attributes:
        worth: float32 [L, J], expected discount by whole iterations, from the next visit on; the policy keeps it.
        absent: by key, whether the expert holds no room.

    Args:
        discount: what an expert loses of its worth with each iteration; a layer's share of it for each layer.
    """

    def __init__(self, layers: int, experts: int, discount: float) -> None:
        now, layer = np.arange(-1, layers)[:, None], np.arange(layers)
        distance = np.where(layer > now, layer - now, layers + layer - now)
        self._discounts = np.repeat(discount ** (distance / layers), experts, axis=1).astype(np.float32)
        self._discount = self._discounts[0]
        self.worth = np.zeros((layers, experts), dtype=np.float32)
        self._flat = self.worth.reshape(-1)
        self.absent = [True] * (layers * experts)

    def move(self, layer: int) -> None:
        """The gate of ``layer`` has decided; -1 for the beginning of an iteration."""
        self._discount = self._discounts[layer + 1]

    def record_use(self, keys: Sequence[int]) -> None:
        """The policy, which sees the gates, sets what experts are worth."""

    def record_guidance(self, probabilities: np.ndarray) -> None:
        """The policy sets what experts are worth."""

    def record_load(self, key: int) -> None:
        self.absent[key] = False

    def record_eviction(self, key: int) -> None:
        self.absent[key] = True

    def values(self, keys: np.ndarray) -> np.ndarray:
        return self._discount[keys] * self._flat[keys]

    def speculative_value(self, key: int, probability: float) -> float:
        return float(self._discount[key] * self._flat[key])

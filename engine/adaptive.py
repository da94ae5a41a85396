"""``adaptive``: keep what is worth most at its next visit, fetch what is likely to be used in this token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.eviction import EvictionRule
from engine.hardware import Hardware
from engine.policies import NOTHING, Offers
from engine.predictors.fitted import Forecast
from engine.selection import select_deliverable
from engine.traces import TracedRequest
from engine.transfer_queue import Prefetch


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """What is chosen by replaying the store's side, see ``choose_settings``.

    Attributes:
        discount: gamma, what an expert loses of its worth with each token until its use.
        threshold: probability from which an expert is fetched ahead; above 1 none is.
        depth: layers fetched ahead at most.
    """

    discount: float
    threshold: float
    depth: int


def raise_values(values: np.ndarray, upcoming: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Values once the next visit's probability turns out to be ``known``, if that is more than ``upcoming``.

    A value is p + (1 - p) * rest; p rises, the rest stays. Lower probabilities change nothing: what an expert is worth
    after this token is known worse than that, and lowering lost time in the study (FINDINGS, finding 8).
    """
    rest = (1.0 - values) / np.maximum(1.0 - upcoming, 1e-6)
    return np.where(known > upcoming, 1.0 - (1.0 - known) * np.minimum(rest, 1.0), values)


class ExpectedUse:
    """Evict the expert of the lowest worth, discounted by the layers until its next visit."""

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


class PreparedAdaptive:
    """Expected use decides evictions; what is known of the current token raises it, never lowers it, and is fetched."""

    per_layer = False

    def __init__(
        self,
        layers: int,
        experts: int,
        hardware: Hardware,
        settings: AdaptiveSettings,
        forecast: Callable[[TracedRequest, float], Forecast],
    ) -> None:
        self._rule = ExpectedUse(layers, experts, settings.discount)
        self.rule: EvictionRule = self._rule
        self._layers = layers
        self._experts = experts
        self._hardware = hardware
        self._settings = settings
        self._forecast = forecast
        nothing: np.ndarray = np.empty(0, dtype=np.float32)
        self._before = self._left = self._raised = nothing
        self._start: list[list[Prefetch]] = []
        self._ahead: list[list[Prefetch]] = []

    def begin_request(self, request: TracedRequest, position: int) -> None:
        forecast = self._forecast(request, self._settings.discount)
        layers, depth = self._layers, forecast.current.shape[2]
        upcoming, values = forecast.upcoming[:-1], forecast.values[:-1]
        self._before = raise_values(values, upcoming, forecast.start)
        self._left = forecast.left
        self._raised = np.zeros_like(forecast.current)
        for i in range(min(depth, layers - 1)):
            ahead = slice(i + 1, layers)
            known = np.maximum(forecast.start[:, ahead], forecast.current[:, : layers - i - 1, i])
            self._raised[:, : layers - i - 1, i] = raise_values(values[:, ahead], upcoming[:, ahead], known)
        depth = min(depth, self._settings.depth)
        self._start = self._likely(forecast.start[:, None, :depth], position, first_layer=0)
        self._ahead = self._likely(forecast.current[:, :, :depth], position, first_layer=1)
        self._position = position

    def begin_iteration(self, iteration: int) -> Offers:
        self._rule.move(-1)
        self._rule.worth[:] = self._before[iteration]
        return self._select(self._start[iteration], self._position + iteration * self._layers - 1)

    def observe(self, iteration: int, layer: int) -> Offers:
        rule, layers = self._rule, self._layers
        rule.move(layer)
        rule.worth[layer] = self._left[iteration, layer]
        ahead = min(self._raised.shape[2], layers - 1 - layer)
        rule.worth[layer + 1 : layer + 1 + ahead] = self._raised[iteration, layer, :ahead]
        moment = iteration * layers + layer
        return self._select(self._ahead[moment], self._position + moment)

    def _likely(self, known: np.ndarray, position: int, first_layer: int) -> list[list[Prefetch]]:
        """Prefetches for each moment of ``known`` [T, M, D, J], whose layer i is ``moment + first_layer + i``."""
        iterations, moments, _, experts = known.shape
        offers: list[list[Prefetch]] = [[] for _ in range(iterations * moments)]
        found = np.nonzero(known >= self._settings.threshold)
        probabilities = known[found].tolist()
        for t, moment, i, expert, p in zip(*(f.tolist() for f in found), probabilities, strict=True):
            layer = moment + first_layer + i
            due = position + t * self._layers + layer
            offers[t * moments + moment].append(Prefetch(layer * experts + expert, due, p))
        return offers

    def _select(self, likely: list[Prefetch], now: int) -> Offers:
        absent = self._rule.absent
        wanted = [prefetch for prefetch in likely if absent[prefetch.key]]
        return select_deliverable(wanted, now, self._hardware) if wanted else NOTHING

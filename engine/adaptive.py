"""``adaptive``: keep what is worth most at its next visit, fetch what is likely to be used in this token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.eviction import EvictionRule
from engine.hardware import Hardware
from engine.policies import Offers
from engine.traces import TracedRequest, TraceManifest
from engine.transfer_queue import Prefetch
from engine.use_forecast import Forecast

_DISCOUNT = 0.6
# Where computing a layer hides less than a tenth of a copy, only near certainties are worth the link.
_THRESHOLD, _THRESHOLD_LINK_BOUND, _LINK_BOUND = 0.4, 0.7, 0.1


def worth(upcoming: np.ndarray, lasting: np.ndarray) -> np.ndarray:
    """Expected discounted use from the next visit on: p there, q at every later one, a token apart each."""
    later = _DISCOUNT * lasting / (1.0 - (1.0 - lasting) * _DISCOUNT)
    return upcoming + (1.0 - upcoming) * later


class ExpectedUse:
    """Evict the expert of the lowest worth, discounted by the layers until its next visit."""

    def __init__(self, manifest: TraceManifest) -> None:
        layers = manifest.layers
        now, layer = np.arange(-1, layers)[:, None], np.arange(layers)
        distance = np.where(layer > now, layer - now, layers + layer - now)
        self._discount = np.repeat(_DISCOUNT ** (distance / layers), manifest.experts, axis=1).astype(np.float32)
        self.worth = np.zeros((layers, manifest.experts), dtype=np.float32)
        self._flat = self.worth.reshape(-1)
        self.now = -1

    def record_use(self, keys: Sequence[int]) -> None:
        """The policy, which sees the gates, sets what experts are worth."""

    def record_guidance(self, probabilities: np.ndarray) -> None:
        """The policy sets what experts are worth."""

    def record_load(self, key: int) -> None:
        """An expert's worth does not depend on where it is."""

    def record_eviction(self, key: int) -> None:
        """An expert's worth does not depend on where it is."""

    def values(self, keys: np.ndarray) -> np.ndarray:
        return self._discount[self.now + 1][keys] * self._flat[keys]

    def speculative_value(self, key: int, probability: float) -> float:
        return float(self._discount[self.now + 1][key] * self._flat[key])


class Adaptive:
    """Expected use decides evictions; what is known of the current token raises it, never lowers it, and is fetched."""

    per_layer = False

    def __init__(
        self, manifest: TraceManifest, hardware: Hardware, forecast: Callable[[TracedRequest], Forecast]
    ) -> None:
        self._rule = ExpectedUse(manifest)
        self.rule: EvictionRule = self._rule
        self._manifest = manifest
        bound = hardware.layer_seconds < _LINK_BOUND * hardware.copy_seconds
        self._threshold = _THRESHOLD_LINK_BOUND if bound else _THRESHOLD
        self._forecast = forecast
        nothing: np.ndarray = np.empty(0, dtype=np.float32)
        self._upcoming = self._lasting = self._raised = nothing
        self._start: list[list[Prefetch]] = []
        self._ahead: list[list[Prefetch]] = []

    def begin_request(self, request: TracedRequest, position: int) -> None:
        forecast = self._forecast(request)
        layers = self._manifest.layers
        depth = forecast.current.shape[2]
        self._upcoming = worth(forecast.upcoming, forecast.lasting)
        self._lasting = worth(forecast.lasting[1:], forecast.lasting[1:])
        self._raised = np.zeros_like(forecast.current)
        for i in range(depth):
            ahead = slice(i + 1, layers)
            known = np.maximum(forecast.upcoming[:-1, ahead], forecast.current[:, : layers - i - 1, i])
            self._raised[:, : layers - i - 1, i] = worth(known, forecast.lasting[:-1, ahead])
        first = forecast.upcoming[:-1, :depth][:, None]
        self._start = self._likely(first, position, first_layer=0)
        self._ahead = self._likely(forecast.current, position, first_layer=1)

    def begin_iteration(self, iteration: int) -> Offers:
        self._rule.now = -1
        self._rule.worth[:] = self._upcoming[iteration]
        return self._start[iteration]

    def observe(self, iteration: int, layer: int) -> Offers:
        rule = self._rule
        layers, depth = self._manifest.layers, self._raised.shape[2]
        rule.now = layer
        rule.worth[layer] = self._lasting[iteration, layer]
        ahead = min(depth, layers - 1 - layer)
        rule.worth[layer + 1 : layer + 1 + ahead] = self._raised[iteration, layer, :ahead]
        return self._ahead[iteration * layers + layer]

    def _likely(self, known: np.ndarray, position: int, first_layer: int) -> list[list[Prefetch]]:
        """Prefetches for each moment of ``known`` [T, M, D, J], whose layer i is ``moment + first_layer + i``."""
        iterations, moments, _, experts = known.shape
        offers: list[list[Prefetch]] = [[] for _ in range(iterations * moments)]
        found = np.nonzero(known >= self._threshold)
        probabilities = known[found].tolist()
        for t, moment, i, expert, p in zip(*(f.tolist() for f in found), probabilities, strict=True):
            layer = moment + first_layer + i
            due = position + t * self._manifest.layers + layer
            offers[t * moments + moment].append(Prefetch(layer * experts + expert, due, p))
        return offers

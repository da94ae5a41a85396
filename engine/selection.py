"""Which experts a matched map says to prefetch, and in which order (paper section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.hardware import Hardware

if TYPE_CHECKING:
    from engine.transfer_queue import Prefetch


def selection_threshold(score: float) -> float:
    """delta = clip(1 - score, 0, 1): the less similar the match, the more experts are fetched (equation 5)."""
    return float(min(max(1.0 - score, 0.0), 1.0))


def select_experts(probabilities: np.ndarray, threshold: float, minimum: int) -> np.ndarray:
    """The smallest set of experts, by falling probability, whose sum is >= ``threshold``; at least ``minimum``.

    Args:
        probabilities: [J], the matched map's distribution for one layer.
        threshold: delta in [0, 1]. Where rounding keeps the whole sum below it, all experts are taken.
        minimum: K, the experts a token will need in any case.

    Returns:
        Expert ids by falling probability; equal probabilities by rising id.
    """
    order = (-probabilities).argsort(kind="stable")
    likeliest = probabilities[order]
    if likeliest[:minimum].sum(dtype=np.float64) >= threshold:
        return order[:minimum]
    smallest = int(likeliest.cumsum(dtype=np.float64).searchsorted(threshold)) + 1
    return order[:smallest]


def select_many(probabilities: np.ndarray, thresholds: np.ndarray, minimum: int) -> list[list[int]]:
    """``select_experts`` for many layers at once: distributions [N, J] and thresholds [N] give N lists of ids."""
    order = (-probabilities).argsort(axis=1, kind="stable")
    sums = np.take_along_axis(probabilities, order, axis=1).cumsum(axis=1, dtype=np.float64)
    sizes = np.maximum((sums < thresholds[:, None]).sum(axis=1) + 1, minimum)
    widest = min(int(sizes.max(initial=0)), order.shape[1])
    return [row[:size] for row, size in zip(order[:, :widest].tolist(), sizes.tolist(), strict=True)]


def prefetch_priority(probability: float, distance: int) -> float:
    """p / (l - l_now): likely experts of near layers first; ``distance`` in layers, at least 1 (section 4.3)."""
    return probability / max(distance, 1)


def select_deliverable(prefetches: Sequence[Prefetch], now: int, hardware: Hardware) -> list[Prefetch]:
    """Those that the link can deliver, at least in part, before their gates decide, by expected stall saved a byte.

    Until the gate of a layer that is n layers ahead the link moves n * c / t experts. What it moves of an expert that
    is used spares the layer that much waiting.

    Args:
        prefetches: absent experts.
        now: position of the layer whose gate decided last.
    """
    pace = hardware.layer_seconds / hardware.copy_seconds
    ranked = sorted(prefetches, key=lambda p: p.probability * min(1.0, pace * (p.due - now)), reverse=True)
    chosen: list[Prefetch] = []
    for prefetch in ranked:
        if pace * (prefetch.due - now) > len(chosen):
            chosen.append(prefetch)
    return chosen

"""The form in which predictors hand over what they estimate, so that a logistic mix can weigh it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Features = Mapping[str, np.ndarray]
"""Estimates by the name of their predictor, all of one shape, on a logarithmic scale."""

_FLOOR = np.float32(0.01)


def stack_features(names: Sequence[str], features: Features) -> np.ndarray:
    """Those of these names in one array, float32 [F, ...]."""
    stack = np.empty((len(names), *features[names[0]].shape), dtype=np.float32)
    for row, name in zip(stack, names, strict=True):
        row[...] = features[name]
    return stack


def log_share(probabilities: np.ndarray) -> np.ndarray:
    """Logarithm of estimated shares; all that is below a per cent looks alike."""
    return np.log(probabilities + _FLOOR)


def log_odds(probabilities: np.ndarray) -> np.ndarray:
    """Logit of probabilities, for one mix as an input of the next."""
    bounded = np.clip(probabilities, 1e-4, 1.0 - 1e-4)
    return np.log(bounded / (1.0 - bounded))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Distributions over the last axis."""
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def map_logits(maps: np.ndarray) -> np.ndarray:
    """Logits, but for a constant, that give these distributions; what is below 1e-4 is lost."""
    logits = np.log(np.maximum(maps, 1e-4))
    return logits - logits.mean(axis=-1, keepdims=True)


def margins(logits: np.ndarray, top_k: int) -> np.ndarray:
    """How far each logit lies above the line between the K-th and the next, [..., J]."""
    experts = logits.shape[-1]
    ranked = np.partition(logits, [experts - top_k - 1, experts - top_k], axis=-1)
    line = 0.5 * (ranked[..., experts - top_k - 1] + ranked[..., experts - top_k])
    return logits - line[..., None]

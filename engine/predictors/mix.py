"""A mix: estimates of several predictors, weighed into one calibrated probability; of a single one, its calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from engine.logistic import fit_logistic, sigmoid
from engine.predictors.features import Features, stack_features


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """A logistic function of named features.

    Attributes:
        names: of the features, F of them.
        weights: float32 [F + 1, ...], the last one the bias; further axes are those of the features' last ones.
    """

    names: tuple[str, ...]
    weights: np.ndarray

    def __call__(self, features: Features) -> np.ndarray:
        """Probabilities in the shape of the features."""
        return self.weigh(stack_features(self.names, features))

    def weigh(self, stack: np.ndarray) -> np.ndarray:
        """Probabilities [...] of features that are stacked by ``names`` already, [F, ...]."""
        between = (1,) * (stack.ndim - self.weights.ndim)
        weights = self.weights.reshape(len(self.weights), *between, *self.weights.shape[1:])
        total = np.add.reduce(weights[:-1] * stack)
        total += weights[-1]
        return sigmoid(total).astype(np.float32, copy=False)


@lru_cache(maxsize=64)
def join_mixes(mixes: tuple[Mix, ...]) -> Mix:
    """D mixes of the same features as one of features [..., D, J], each of which weighs its own of them."""
    return Mix(mixes[0].names, np.stack([mix.weights for mix in mixes], axis=1)[:, :, None])


def log_loss(said: np.ndarray, happened: np.ndarray) -> float:
    """Mean negative logarithm, in nats, of the probability [N] that was given to what happened, [N] of 0 or 1."""
    bounded = np.clip(said.astype(np.float64), 1e-6, 1.0 - 1e-6)
    return float(-(happened * np.log(bounded) + (1.0 - happened) * np.log(1.0 - bounded)).mean())


def fit_mix(names: Sequence[str], rows: Features, happened: np.ndarray) -> Mix:
    """The mix of maximum likelihood.

    Args:
        names: features to weigh.
        rows: features [N] each.
        happened: [N] in 0..1; a fraction stands for a share of cases.
    """
    columns = np.column_stack([rows[name] for name in names])
    return Mix(tuple(names), fit_logistic(columns, happened).astype(np.float32))

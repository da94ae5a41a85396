"""Logistic regression by Newton's method: a handful of weights over many rows, fitted in a moment."""

from __future__ import annotations

import numpy as np

_STEPS = 12
_RIDGE = 1e-3


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def fit_logistic(features: np.ndarray, happened: np.ndarray) -> np.ndarray:
    """Weights [F + 1], the last one the bias, that make sigmoid(features @ w + bias) the likelihood of ``happened``.

    Args:
        features: [N, F].
        happened: [N], 0 or 1.
    """
    rows = np.column_stack([features, np.ones(len(features))]).astype(np.float64)
    weights = np.zeros(rows.shape[1])
    ridge = _RIDGE * len(rows) * np.eye(len(weights))
    ridge[-1, -1] = 1e-9
    for _ in range(_STEPS):
        likely = sigmoid(rows @ weights)
        gradient = rows.T @ (happened - likely) - ridge @ weights
        curvature = (rows * (likely * (1 - likely))[:, None]).T @ rows + ridge
        weights += np.linalg.solve(curvature, gradient)
    return weights

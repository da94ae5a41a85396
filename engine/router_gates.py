"""The routers' own weights: what turns the input of a gate into its distribution, also for a gate yet to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

GateScoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, eq=False)
class RouterGates:
    """The linear maps of all L gates over inputs of H numbers.

    Attributes:
        weights: float32 [L, J, H].
        bias: float32 [L, J] added to the logits; None where routers have none. A bias that only steers the choice of
            experts, as DeepSeek-V3's, is no part of it.
        scoring: "softmax" of the logits, or their "sigmoid" divided by its sum.
    """

    weights: np.ndarray
    bias: np.ndarray | None
    scoring: GateScoring

    def probabilities(self, layer: int, inputs: np.ndarray) -> np.ndarray:
        """float32 [..., J], what gate ``layer`` would decide for inputs [..., H] of any gate."""
        logits = inputs.astype(np.float32) @ self.weights[layer].T
        if self.bias is not None:
            logits += self.bias[layer]
        if self.scoring == "softmax":
            shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        else:
            # The logistic function by its hyperbolic form, which cannot overflow.
            shares = 0.5 * (1.0 + np.tanh(0.5 * logits))
        return shares / shares.sum(axis=-1, keepdims=True)

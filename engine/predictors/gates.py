"""Later gates guessed from what an earlier one read: applied as they are, or through a map learnt from recordings.

The first is the speculation of Mixtral-Offloading (one layer ahead) and ProMoE (a stride); it needs no training and no
store. The second is a ridge from the gate input of layer l to the logits of layer l + d, of the same layer in the next
iteration, and of all its layers; and from an iteration's embedding to all its gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.predictors.features import Features, log_share, map_logits, margins, softmax
from engine.predictors.ridge import apply_ridge, choose_strength, fit_ridge
from engine.router_gates import RouterGates
from engine.traces import TracedRequest


@dataclass(frozen=True, slots=True, eq=False)
class GateMaps:
    """Ridge maps, each float [inputs + 1, outputs].

    Attributes:
        ahead: by layer l, from its gate's input to the logits of layers l + 1 .. l + D at once.
        same: by layer, to the logits of the same layer in the next iteration.
        last: from the last layer's gate input to all logits of the next iteration.
    """

    ahead: tuple[np.ndarray, ...]
    same: tuple[np.ndarray, ...]
    last: np.ndarray


def fit_gate_maps(requests: list[TracedRequest], gates: RouterGates, depth: int) -> GateMaps:
    """Fit them on recorded decode steps with gate inputs; D is ``depth``."""
    layers = len(gates.weights)
    inputs = np.concatenate([r.gate_inputs for r in requests if r.gate_inputs is not None])
    logits = np.stack([gate_logits(gates, layer, inputs[:, layer]) for layer in range(layers)], axis=1)
    # The last step of a request has no successor.
    ends = np.cumsum([len(request) for request in requests]) - 1
    before = np.setdiff1d(np.arange(len(inputs)), ends)
    after = logits[before + 1]
    strength = choose_strength(inputs[:, 0], logits[:, min(1, layers - 1)])
    strength_after = choose_strength(inputs[before, 0], after[:, 0])
    ahead, same = [], []
    for layer in range(layers):
        targets = logits[:, layer + 1 : layer + 1 + depth].reshape(len(inputs), -1)
        ahead.append(fit_ridge(inputs[:, layer], targets, strength))
        same.append(fit_ridge(inputs[before, layer], after[:, layer], strength_after))
    last = fit_ridge(inputs[before, -1], after.reshape(len(before), -1), strength_after)
    return GateMaps(tuple(ahead), tuple(same), last)


def fit_embedding_map(requests: list[TracedRequest], experts: int) -> np.ndarray:
    """From an iteration's embedding to the logarithms of all its gates' distributions: [h + 1, L * J]."""
    embeddings = np.concatenate([r.embeddings for r in requests if r.embeddings is not None])
    logits = np.concatenate([map_logits(request.maps(experts)) for request in requests])
    strength = choose_strength(embeddings, logits[:, 0])
    return fit_ridge(embeddings, logits.reshape(len(logits), -1), strength)


def gate_logits(gates: RouterGates, layer: int, inputs: np.ndarray) -> np.ndarray:
    """[..., J], what gate ``layer`` computes from inputs [..., H]."""
    logits = inputs.astype(np.float32) @ gates.weights[layer].T
    return logits if gates.bias is None else logits + gates.bias[layer]


class Speculation:
    """The gates' own weights applied to earlier inputs, and the ridge maps."""

    def __init__(self, gates: RouterGates, maps: GateMaps, top_k: int) -> None:
        self._gates = gates
        self._maps = maps
        self._top_k = top_k

    def ahead(self, layer: int, stop: int, inputs: np.ndarray) -> Features:
        """Of the layers after ``layer`` up to ``stop`` from what its gate read, inputs [B, H]: [B, layers, J]."""
        gates, layers = self._gates, slice(layer + 1, stop)
        _, experts, width = gates.weights.shape
        logits = np.empty((2, len(inputs), stop - layer - 1, experts), dtype=np.float32)
        spoken, learnt = logits.reshape(2, len(inputs), -1)
        np.matmul(inputs.astype(np.float32, copy=False), gates.weights[layers].reshape(-1, width).T, out=spoken)
        if gates.bias is not None:
            spoken += gates.bias[layers].reshape(-1)
        learnt[:] = apply_ridge(self._maps.ahead[layer], inputs)
        said = logit_features("both", logits, self._top_k)
        (gate, ridge), (gate_margin, ridge_margin) = said["both"], said["both-margin"]
        return {"gate": gate, "gate-margin": gate_margin, "ridge": ridge, "ridge-margin": ridge_margin}

    def same(self, layer: int, inputs: np.ndarray) -> Features:
        """Of the same layer in the next iteration: [B, 1, J]."""
        return self._features("next-ridge", apply_ridge(self._maps.same[layer], inputs)[:, None])

    def following(self, inputs: np.ndarray) -> Features:
        """Of the whole next iteration, from what the last gate read: [B, L, J]."""
        layers, experts, _ = self._gates.weights.shape
        return self._features("next-ridge", apply_ridge(self._maps.last, inputs).reshape(-1, layers, experts))

    def _features(self, name: str, logits: np.ndarray) -> Features:
        return logit_features(name, logits, self._top_k)


def logit_features(name: str, logits: np.ndarray, top_k: int) -> Features:
    """A guess of a gate's logits in two forms: its distribution, and the distance to being chosen."""
    return {name: log_share(softmax(logits)), f"{name}-margin": margins(logits, top_k)}

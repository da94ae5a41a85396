"""Policies that apply a later layer's gate to what an earlier gate has just read.

Hidden states change little from layer to layer, so the gate of layer l + d names most of its experts from the input of
gate l. The policy of Mixtral-Offloading does so for the next layer (d = 1); that of ProMoE by a stride of several
layers, where it trains a small network a layer: here the gates themselves speak, for both.
"""

from __future__ import annotations

import numpy as np

from engine.eviction import EvictionRule
from engine.observations import ObservedGate, ObservedIteration
from engine.policies import NOT_SEARCHED, NOTHING, Offers
from engine.router_gates import RouterGates
from engine.traces import TracedRequest
from engine.transfer_queue import Prefetch


class Speculative:
    """Prefetches the K experts likeliest by the gate of layer l + d, once gate l has decided; each layer once.

    The first gate speaks for all of the first d layers after it. Prefills, whose gate inputs are not observed, are not
    guided. Several sequences of a batch are guided each by itself.

    Args:
        distance: d, at least 1.
    """

    per_layer = False
    needs_gate_inputs = True
    library_scores = NOT_SEARCHED

    def __init__(self, rule: EvictionRule, gates: RouterGates, top_k: int, distance: int) -> None:
        self.rule = rule
        self._gates = gates
        self._top_k = top_k
        self._distance = distance
        self._begun = 0

    def begin(self, iteration: ObservedIteration) -> Offers:
        self._begun = iteration.number * len(self._gates.weights)
        return NOTHING

    def observe(self, gate: ObservedGate) -> Offers:
        if gate.inputs is None:
            return NOTHING
        offers = []
        for target in targets(gate.layer, self._distance, len(self._gates.weights)):
            likely = self._gates.probabilities(target, gate.inputs)
            offers += choose(likely, self._top_k, target, self._begun + target)
        return offers


class PreparedSpeculative:
    """The same for replays."""

    per_layer = False

    def __init__(self, rule: EvictionRule, gates: RouterGates, top_k: int, distance: int) -> None:
        self.rule = rule
        self._gates = gates
        self._top_k = top_k
        self._distance = distance
        self._offers: list[list[Offers]] = []

    def begin_request(self, request: TracedRequest, position: int) -> None:
        layers = len(self._gates.weights)
        inputs = request.gate_inputs
        self._offers = [[NOTHING] * layers for _ in range(len(request))]
        if inputs is None:
            return
        for layer in range(layers):
            for target in targets(layer, self._distance, layers):
                likely = self._gates.probabilities(target, inputs[:, layer])
                for t, row in enumerate(likely):
                    if request.phases[t] == "decode":
                        due = position + t * layers + target
                        self._offers[t][layer] = [*self._offers[t][layer], *choose(row[None], self._top_k, target, due)]

    def begin_iteration(self, iteration: int) -> Offers:
        return NOTHING

    def observe(self, iteration: int, layer: int) -> Offers:
        return self._offers[iteration][layer]


def targets(layer: int, distance: int, layers: int) -> range:
    """The layers that gate ``layer`` speaks for."""
    first = 1 if layer == 0 else layer + distance
    return range(first, min(layer + distance + 1, layers))


def choose(likely: np.ndarray, top_k: int, layer: int, due: int) -> list[Prefetch]:
    """The K likeliest experts of each of S sequences, likely [S, J]; each expert once, with its largest probability."""
    best = (-likely).argsort(axis=1, kind="stable")[:, :top_k]
    chosen: dict[int, Prefetch] = {}
    for row, experts in zip(likely, best.tolist(), strict=True):
        for expert in experts:
            key, probability = layer * likely.shape[1] + expert, float(row[expert])
            if key not in chosen or chosen[key].probability < probability:
                chosen[key] = Prefetch(key, due, probability)
    return list(chosen.values())

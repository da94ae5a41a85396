"""Speculation by later gates: the rules of Mixtral-Offloading and ProMoE by hand, and both forms alike."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import PolicyError
from engine.eviction import LeastRecentlyUsed
from engine.hardware import Hardware
from engine.observations import ObservedGate, ObservedIteration
from engine.policy_names import PolicyFactory
from engine.replay import Replay
from engine.router_gates import RouterGates
from engine.speculative import PreparedSpeculative, Speculative, choose, targets
from engine.streamed import Streamed
from tests.engine.sample_traces import gated_trace, sample_trace

# One expert takes 0.1 s over the link, a layer 0.05 s to compute.
MACHINE = Hardware(expert_bytes=100, bandwidth=1000.0, latency=0.0, layer_seconds=0.05, chunk_bytes=0)


def test_policy_of_mixtral_offloading_asks_the_next_gate() -> None:
    # Two layers of three experts; the second gate prefers what the first input points at.
    weights = np.array([np.eye(3), [[0, 1, 0], [0, 0, 1], [1, 0, 0]]], dtype=np.float32)
    policy = Speculative(LeastRecentlyUsed(6), RouterGates(weights, None, "softmax"), top_k=1, distance=1)
    policy.begin(ObservedIteration(7, "decode", (0,), None))
    gate = ObservedGate(0, np.zeros((1, 3)), np.zeros((1, 3)), np.array([[5.0, 0.0, 0.0]], dtype=np.float32))
    (offer,) = policy.observe(gate)
    # Expert 2 of layer 1, due at iteration 7's second layer, with the probability its gate gives it.
    assert (offer.key, offer.due) == (3 + 2, 7 * 2 + 1)
    assert offer.probability == pytest.approx(np.exp(5) / (np.exp(5) + 2))


def test_strides_guide_each_layer_once() -> None:
    assert [list(targets(layer, 3, 6)) for layer in range(6)] == [[1, 2, 3], [4], [5], [], [], []]
    assert [list(targets(layer, 1, 3)) for layer in range(3)] == [[1], [2], []]


def test_sequences_share_what_both_want() -> None:
    likely = np.array([[0.6, 0.3, 0.1], [0.2, 0.1, 0.7]])
    assert {(p.key, p.probability) for p in choose(likely, 2, layer=1, due=9)} == {(3, 0.6), (4, 0.3), (5, 0.7)}


def test_prefills_are_not_guided() -> None:
    gates = gated_trace(1, 1).manifest.gates
    assert gates is not None
    policy = Speculative(LeastRecentlyUsed(32), gates, 2, 1)
    assert not policy.observe(ObservedGate(0, np.zeros((1, 8)), np.zeros((1, 8)), None))


@pytest.mark.parametrize("distance", [1, 2])
def test_both_forms_decide_alike(distance: int) -> None:
    trace = gated_trace(3, 20, seed=2)
    gates = trace.manifest.gates
    assert gates is not None
    outcomes = [
        Replay(trace, policy, MACHINE, 10, False).run(0)
        for policy in (
            PreparedSpeculative(LeastRecentlyUsed(32), gates, 2, distance),
            Streamed(Speculative(LeastRecentlyUsed(32), gates, 2, distance), 8),
        )
    ]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].late


def test_a_trace_without_gate_inputs_is_refused() -> None:
    store, test = sample_trace(3, 5, seed=1), sample_trace(3, 5, seed=2)
    with pytest.raises(PolicyError, match="--gate-inputs"):
        PolicyFactory(store, test, 3, 20, MACHINE).build("promoe", 10)

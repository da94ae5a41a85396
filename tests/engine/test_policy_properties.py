"""What holds for every policy by name and both executors: room, the experts that a layer reads, the unseen future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.adaptive_choice import AdaptiveFit
from engine.eviction import EvictionRule
from engine.hardware import Hardware
from engine.policy_names import POLICIES, PolicyFactory
from engine.replay import Replay
from engine.traces import RoutingTrace, TracedRequest
from tests.engine.sample_traces import gated_trace

STORE = gated_trace(4, 6, seed=9)
FIT = AdaptiveFit(STORE)
NAMES = [policy.name for policy in POLICIES]
LAYERS, EXPERTS, TOP_K, STEPS = 4, 8, 2, 8


class WatchedRule:
    """A policy's own rule, with a log of what happens to experts: uses by a layer, loads and evictions."""

    def __init__(self, rule: EvictionRule) -> None:
        self._rule = rule
        self._working: set[int] = set()
        self._held: set[int] = set()
        self.most_held = 0
        self.evicted_while_read: list[int] = []
        self.log: list[tuple[str, object]] = []

    def watch(self, compute: Callable[[float], None]) -> Callable[[float], None]:
        """Know when products are done: what computes next after a gate's decision are those of its experts."""

        def compute_and_finish(seconds: float) -> None:
            compute(seconds)
            self._working = set()

        return compute_and_finish

    def record_use(self, keys: Sequence[int]) -> None:
        self._working = set(keys)
        self.log.append(("use", tuple(keys)))
        self._rule.record_use(keys)

    def record_guidance(self, probabilities: np.ndarray) -> None:
        self._rule.record_guidance(probabilities)

    def record_load(self, key: int) -> None:
        assert key not in self._held
        self._held.add(key)
        self.most_held = max(self.most_held, len(self._held))
        self.log.append(("load", key))
        self._rule.record_load(key)

    def record_eviction(self, key: int) -> None:
        self._held.remove(key)
        if key in self._working:
            self.evicted_while_read.append(key)
        self.log.append(("evict", key))
        self._rule.record_eviction(key)

    def values(self, keys: np.ndarray) -> np.ndarray:
        return self._rule.values(keys)

    def speculative_value(self, key: int, probability: float) -> float:
        return self._rule.speculative_value(key, probability)


def watch(name: str, trace: RoutingTrace, room: int, copy: float, in_place: bool) -> WatchedRule:
    """Replay a trace; an expert takes ``copy`` seconds over the link, a layer half a second to compute."""
    hardware = Hardware(expert_bytes=100, bandwidth=100 / copy, latency=0.0, layer_seconds=0.5, chunk_bytes=30)
    policy = PolicyFactory(STORE, trace, 2, 20, hardware, FIT).build(name)
    watched = WatchedRule(policy.rule)
    policy.rule = watched
    replay = Replay(trace, policy, hardware, room, in_place)
    replay._clock.compute = watched.watch(replay._clock.compute)
    replay.run(warm_up=0)
    return watched


def branch(past: TracedRequest, other: TracedRequest, iteration: int, layer: int) -> TracedRequest:
    """``past`` up to the gate before ``layer`` of an iteration; from there on what ``other`` does."""

    def by_layer(array: np.ndarray, others: np.ndarray) -> np.ndarray:
        joined = array.copy().reshape(STEPS, LAYERS, -1)
        others = others.reshape(joined.shape)
        joined[iteration, layer:] = others[iteration, layer:]
        joined[iteration + 1 :] = others[iteration + 1 :]
        return joined.reshape(array.shape)

    # An iteration's embedding is known before its first gate decides.
    embeddings = np.concatenate([past.embeddings[: iteration + 1], other.embeddings[iteration + 1 :]])
    return replace(
        past,
        experts=by_layer(past.experts, other.experts),
        probabilities=by_layer(past.probabilities, other.probabilities),
        gate_inputs=by_layer(past.gate_inputs, other.gate_inputs),
        embeddings=embeddings,
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=st.integers(0, 10_000), room=st.integers(8, 32), copy=st.sampled_from([0.01, 0.2, 3.0]))
def test_room_is_kept_and_what_a_layer_reads_stays(
    name: str, in_place: bool, seed: int, room: int, copy: float
) -> None:
    watched = watch(name, gated_trace(2, STEPS, seed), room, copy, in_place)
    assert watched.most_held <= room
    assert not watched.evicted_while_read


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("oracle", "perfect")])
@settings(max_examples=5)
@given(
    seed=st.integers(0, 10_000),
    iteration=st.integers(0, STEPS - 1),
    layer=st.integers(0, LAYERS - 1),
    copy=st.sampled_from([0.01, 0.2, 3.0]),
)
def test_the_future_decides_nothing(
    name: str, in_place: bool, seed: int, iteration: int, layer: int, copy: float
) -> None:
    """What a gate and all that follow decide is drawn anew: up to that gate the same experts come and go."""
    trace, other = gated_trace(1, STEPS, seed), gated_trace(1, STEPS, seed + 1)
    changed = RoutingTrace(trace.manifest, (branch(trace.requests[0], other.requests[0], iteration, layer),))
    logs = []
    for whole in (trace, changed):
        log = watch(name, whole, 12, copy, in_place).log
        uses = [place for place, (what, _) in enumerate(log) if what == "use"]
        logs.append(log[: uses[iteration * LAYERS + layer]])
    assert logs[0] == logs[1]


@pytest.mark.parametrize("name", ["oracle", "perfect"])
def test_the_bounds_do_read_the_future(name: str) -> None:
    """Or the test above could not fail."""
    trace, other = gated_trace(1, STEPS, 0), gated_trace(1, STEPS, 1)
    changed = RoutingTrace(trace.manifest, (branch(trace.requests[0], other.requests[0], 4, 0),))
    logs = [watch(name, whole, 12, 0.2, False).log for whole in (trace, changed)]
    uses = [place for place, (what, _) in enumerate(logs[0]) if what == "use"]
    assert logs[0][: uses[4 * LAYERS]] != logs[1][: uses[4 * LAYERS]]

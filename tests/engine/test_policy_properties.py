"""What holds for every policy by name: the room it has, and that the experts a layer reads stay until it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.adaptive_choice import AdaptiveFit
from engine.eviction import EvictionRule
from engine.hardware import Hardware
from engine.policy_names import POLICIES, SPECULATIVE, PolicyFactory
from engine.replay import Replay
from tests.engine.sample_traces import sample_manifest, sample_trace

MANIFEST = sample_manifest(hidden_size=5)
STORE = sample_trace(4, 6, MANIFEST, seed=9)
FIT = AdaptiveFit(STORE)


class WatchedRule:
    """A policy's own rule, and which experts hold room and which of them a layer is reading."""

    def __init__(self, rule: EvictionRule) -> None:
        self._rule = rule
        self._working: set[int] = set()
        self._held: set[int] = set()
        self.most_held = 0
        self.evicted_while_needed: list[int] = []

    def watch(self, compute: Callable[[float], None]) -> Callable[[float], None]:
        """Know when products are done: what computes next after a gate's decision are those of its experts."""

        def compute_and_finish(seconds: float) -> None:
            compute(seconds)
            self._working = set()

        return compute_and_finish

    def record_use(self, keys: Sequence[int]) -> None:
        self._working = set(keys)
        self._rule.record_use(keys)

    def record_guidance(self, probabilities: np.ndarray) -> None:
        self._rule.record_guidance(probabilities)

    def record_load(self, key: int) -> None:
        assert key not in self._held
        self._held.add(key)
        self.most_held = max(self.most_held, len(self._held))
        self._rule.record_load(key)

    def record_eviction(self, key: int) -> None:
        self._held.remove(key)
        if key in self._working:
            self.evicted_while_needed.append(key)
        self._rule.record_eviction(key)

    def values(self, keys: np.ndarray) -> np.ndarray:
        return self._rule.values(keys)

    def speculative_value(self, key: int, probability: float) -> float:
        return self._rule.speculative_value(key, probability)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", [policy.name for policy in POLICIES if policy.name not in SPECULATIVE])
@settings(max_examples=5)
@given(seed=st.integers(0, 10_000), room=st.integers(8, 32), copy=st.sampled_from([0.01, 0.2, 3.0]))
def test_room_is_kept_and_what_a_layer_needs_stays(
    name: str, in_place: bool, seed: int, room: int, copy: float
) -> None:
    trace = sample_trace(2, 8, MANIFEST, seed)
    hardware = Hardware(expert_bytes=100, bandwidth=100 / copy, latency=0.0, layer_seconds=0.5, chunk_bytes=30)
    policy = PolicyFactory(STORE, trace, 2, 20, hardware, FIT).build(name)
    watched = WatchedRule(policy.rule)
    policy.rule = watched
    replay = Replay(trace, policy, hardware, room, in_place)
    replay._clock.compute = watched.watch(replay._clock.compute)
    replay.run(warm_up=0)
    assert watched.most_held <= room
    assert not watched.evicted_while_needed

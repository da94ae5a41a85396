"""The link's bound against every policy, and against an exhaustive search where that is possible."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.link_bound import least_iteration_seconds, least_transfers
from engine.policy_names import POLICIES, PolicyFactory
from engine.replay import Replay
from tests.engine.sample_traces import gated_trace, one_layer_trace
from tests.engine.test_policy_properties import FIT, STORE
from tests.engine.test_replay import SLOW


def fewest(uses: tuple[int, ...], experts: int, room: int) -> int:
    """Transfers of the best of all ways to keep ``room`` experts from use to use, whatever is there at first."""

    @cache
    def cost(place: int, held: frozenset[int]) -> int:
        if place == len(uses):
            return 0
        key = uses[place]
        if key in held:
            return cost(place + 1, held)
        return 1 + min(cost(place + 1, held), *(cost(place + 1, held - {out} | {key}) for out in held))

    return min(cost(0, frozenset(start)) for start in combinations(range(experts), room))


@settings(max_examples=60, deadline=None)
@given(uses=st.lists(st.integers(0, 4), min_size=1, max_size=9), room=st.integers(1, 4))
def test_no_way_to_keep_experts_needs_fewer_transfers(uses: list[int], room: int) -> None:
    trace = one_layer_trace([[key] for key in uses], experts=5)
    assert least_transfers(trace, room) == fewest(tuple(uses), 5, room)


@pytest.mark.parametrize("in_place", [False, True])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), room=st.integers(8, 31), copy=st.sampled_from([0.02, 0.3, 3.0]))
def test_no_policy_is_faster_than_the_link(in_place: bool, seed: int, room: int, copy: float) -> None:
    trace = gated_trace(2, 8, seed=seed)
    hardware = replace(SLOW, bandwidth=SLOW.expert_bytes / copy, chunk_bytes=30)
    factory = PolicyFactory(STORE, trace, 2, 20, hardware, FIT)
    bound = least_iteration_seconds(trace, hardware, room, warm_up=4)
    for policy in POLICIES:
        outcome = Replay(trace, factory.build(policy.name, room, in_place), hardware, room, in_place).run(warm_up=4)
        assert outcome.tpot_seconds >= bound * (1 - 1e-9), policy.name

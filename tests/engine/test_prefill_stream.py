"""The order in which experts stream through a prefill, what makes room for them, and what stays behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.replay as replaying
from engine.bounds import NextUse
from engine.eviction import FirstInFirstOut, LeastFrequentlyUsed, LeastRecentlyUsed
from engine.hardware import Hardware
from engine.policies import PreparedOnDemand
from engine.prefill_stream import RING_SHARE, PrefillStream, open_stream
from engine.replay import Replay, ReplayOutcome
from engine.residents import Residents
from engine.traces import RoutingTrace
from tests.engine.sample_traces import one_layer_trace, prefill_trace, sample_manifest

L, J, K = 6, 16, 2
MANIFEST = replace(sample_manifest(L, J, K), distributions="none")
# A layer of 40 tokens computes for 0.5 + 39 * 0.1 s, about as long as the link takes for four of its experts.
HARDWARE = Hardware(
    expert_bytes=100, bandwidth=100.0, latency=0.0, layer_seconds=0.5, chunk_bytes=30, token_seconds=0.1
)
RULES = {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed, "fifo": FirstInFirstOut}


def replay(trace: RoutingTrace, rule: str, room: int, per_layer: bool = False) -> ReplayOutcome:
    policy = PreparedOnDemand(RULES[rule](L * J), per_layer)
    return Replay(trace, policy, HARDWARE, room, in_place=False).run(warm_up=0)


def begun(slots: int, held: list[int], tokens: int = 64) -> PrefillStream:
    stream = PrefillStream(LeastRecentlyUsed(L * J), L, J, K, slots)
    assert stream.begin(tokens, lambda: held)
    return stream


def test_decided_experts_come_before_those_of_layers_ahead_in_their_order() -> None:
    stream, held = begun(32, []), set()

    def send() -> tuple[int, bool]:
        load = stream.next_load(held.__contains__)
        assert load is not None
        held.add(load.key)
        stream.record_load(load.key)
        return load.key, load.decided

    assert [send() for _ in range(4)] == [(0, False), (1, False), (2, False), (3, False)]
    assert stream.next_load(held.__contains__) is None  # the ring is full
    stream.decide({1: 40, 9: 60, 12: 28}, absent=[9, 12])
    assert [send() for _ in range(3)] == [(9, True), (12, True), (J, False)]


def test_experts_expected_to_be_used_most_are_sent_first() -> None:
    stream = begun(32, [])
    for layer in range(L):
        stream.decide({layer * J + 5: 64, layer * J + 7: 60, layer * J + 2: 4}, absent=[])
    assert stream.begin(16, list)
    assert [stream.next_load(set(skipped).__contains__).key for skipped in ([], [5], [5, 7])] == [5, 7, 2]


@pytest.mark.parametrize(("tokens", "streams"), [(1, False), (4, False), (6, True), (512, True)])
def test_few_tokens_do_not_stream(tokens: int, streams: bool) -> None:
    assert PrefillStream(LeastRecentlyUsed(L * J), L, J, K, 32).begin(tokens, list) is streams


def test_narrow_routing_is_learnt_and_does_not_stream() -> None:
    stream = begun(32, [])
    for layer in range(L):
        stream.decide({layer * J: 640, layer * J + 1: 640}, absent=[])
    assert not stream.begin(6, list)


def test_a_rule_that_knows_the_future_is_left_alone() -> None:
    trace = one_layer_trace([[0, 1], [2, 3]], J)
    assert open_stream(NextUse(trace), 1, J, K, 8) is None
    assert open_stream(LeastRecentlyUsed(J), 1, J, K, 8) is not None


def test_left_overs_keep_their_slots_but_for_the_ring_furthest_layers_first() -> None:
    rule = LeastRecentlyUsed(L * J)
    residents = Residents(rule, J, 32)
    for layer in range(L):
        residents.admit([layer * J + e for e in range(5)], ())
    residents.admit([90, 91], ())
    stream = PrefillStream(rule, L, J, K, 32)
    assert stream.begin(64, residents.keys)
    residents.rule = stream
    came = []
    while (load := stream.next_load(residents.holds)) is not None:
        if not residents.admit_speculatively(load.key, load.worth, ()):
            break
        came.append(load.key)
    ring = 32 // RING_SHARE
    assert came == [5, 6, 7, 8][:ring]
    gone = {layer * J + e for layer in range(L) for e in range(5)} | {90, 91}
    assert {key // J for key in gone - set(residents.keys())} == {L - 1}
    assert len(residents.keys()) == 32


def test_what_a_prompt_used_most_stays_behind_in_every_layer() -> None:
    trace = prefill_trace(1, 200, 0, MANIFEST)
    counts = trace.requests[0].counts
    keys = [key for layer in trace.requests[0].keys(J)[0] for key in layer]
    room = 40
    policy = PreparedOnDemand(LeastRecentlyUsed(L * J))
    run = Replay(trace, policy, HARDWARE, room, in_place=False)
    run.run(warm_up=0)
    held = set(run._residents.keys())
    hottest = {keys[i] for i in np.argsort(-counts)[: room - 2 * (room // RING_SHARE)]}
    assert len(held & hottest) >= len(hottest) - 1
    assert {key // J for key in held} == set(range(L))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    room=st.integers(1, L * J),
    tokens=st.integers(8, 60),
    rule=st.sampled_from(sorted(RULES)),
    per_layer=st.booleans(),
)
def test_bytes_and_room_add_up_and_every_layer_is_served(
    seed: int, room: int, tokens: int, rule: str, per_layer: bool
) -> None:
    trace = prefill_trace(3, tokens, 3, MANIFEST, seed)
    room = max(room, K * L if per_layer else K)
    outcome = replay(trace, rule, room, per_layer)
    prefill = outcome.prefill
    assert prefill is not None
    routed = sum(len(request.routed(0, layer)) for request in trace.requests for layer in range(L))
    assert prefill.routed == routed
    assert prefill.hit + prefill.late + prefill.miss == pytest.approx(1.0)
    # A copy under way at the end of a phase is counted in the next.
    moved = prefill.bytes_moved // HARDWARE.expert_bytes
    assert moved >= prefill.routed * prefill.miss - len(trace.requests)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), room=st.sampled_from([10, 24, 48]), rule=st.sampled_from(sorted(RULES)))
def test_each_missing_expert_crosses_the_link_once(seed: int, room: int, rule: str) -> None:
    """A second prefill moves no more than it needs and does not find, but for what the ring has cost."""
    trace = prefill_trace(2, 80, 0, MANIFEST, seed)
    policy = PreparedOnDemand(RULES[rule](L * J))
    first = Replay(RoutingTrace(MANIFEST, trace.requests[:1]), policy, HARDWARE, room, in_place=False)
    first.run(warm_up=0)
    held = set(first._residents.keys())
    needed = {key for layer in trace.requests[1].keys(J)[0] for key in layer}
    first._trace = RoutingTrace(MANIFEST, trace.requests[1:])
    before = first._clock.copies
    first.run(warm_up=0)
    unused = first._residents.wasted + room // RING_SHARE
    assert first._clock.copies - before <= len(needed - held) + 2 * max(1, room // RING_SHARE) + unused


def test_a_stream_is_faster_and_leaves_more_for_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = prefill_trace(6, 80, 6, MANIFEST, seed=3)
    streamed = replay(trace, "lru", 48)
    monkeypatch.setattr(replaying, "open_stream", lambda *shape: None)
    plain = replay(trace, "lru", 48)
    assert streamed.prefill is not None and plain.prefill is not None
    assert streamed.prefill.bytes_moved < 0.85 * plain.prefill.bytes_moved
    assert streamed.prefill.seconds < 0.7 * plain.prefill.seconds
    assert streamed.hit > plain.hit


def test_the_link_is_never_idle_while_something_is_missing_ahead() -> None:
    """Computing takes less than copying: what is stalled and what is hidden make up the time of the copies."""
    fast = replace(HARDWARE, token_seconds=0.01)
    trace = prefill_trace(1, 80, 0, MANIFEST)
    run = Replay(trace, PreparedOnDemand(LeastRecentlyUsed(L * J)), fast, 24, in_place=False)
    outcome = run.run(warm_up=0)
    # Nothing is left to be copied when the last expert is computed, half a layer's share of it at most.
    last = fast.layer_time(80) / 2
    assert outcome.seconds <= run._clock.copies * fast.copy_seconds + last

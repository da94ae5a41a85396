from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache import ExpertCache
from engine.errors import BudgetError
from engine.eviction import EvictionRule, LeastFrequentlyUsed, LeastRecentlyUsed, ProbabilityFrequency
from engine.hardware import Hardware, preset
from engine.map_search import Guidance
from engine.policies import Guided, PreparedOnDemand
from engine.policy_names import POLICIES, SPECULATIVE, PolicyFactory
from engine.replay import Replay, ReplayOutcome
from engine.residents import Residents
from engine.traces import RoutingTrace
from tests.engine.sample_traces import one_layer_trace, sample_manifest, sample_trace

# One expert takes 1 s over the link, a layer 0.5 s to compute.
SLOW = Hardware(expert_bytes=100, bandwidth=100.0, latency=0.0, layer_seconds=0.5, chunk_bytes=0)
# Those that read gate inputs are tested beside their code.
NAMES = [policy.name for policy in POLICIES if policy.name not in SPECULATIVE]
ONLINE = [name for name in NAMES if name not in ("oracle", "perfect")]


def run(
    name: str, trace: RoutingTrace, capacity: int, hardware: Hardware = SLOW, in_place: bool = False
) -> ReplayOutcome:
    policy = PolicyFactory(sample_trace(4, 6, trace.manifest, seed=9), trace, 2, 20, SLOW).build(name, capacity)
    return Replay(trace, policy, hardware, capacity, in_place).run(warm_up=0)


def demand(rule: EvictionRule, uses: list[list[int]], capacity: int, in_place: bool = False) -> ReplayOutcome:
    trace = one_layer_trace(uses, experts=4)
    return Replay(trace, PreparedOnDemand(rule), SLOW, capacity, in_place).run(warm_up=0)


def test_lru_by_hand() -> None:
    # miss 0, miss 1, hit 0, miss 2 (evicts 1), miss 1 (evicts 0)
    outcome = demand(LeastRecentlyUsed(4), [[0], [1], [0], [2], [1]], capacity=2)
    assert (outcome.hit, outcome.late, outcome.miss) == (0.2, 0, 0.8)
    assert outcome.bytes_moved == 400
    assert outcome.stall_seconds == pytest.approx(4.0)
    assert outcome.tpot_seconds == pytest.approx((4.0 + 5 * 0.5) / 5)


def test_lfu_by_hand() -> None:
    # 0 is used twice and stays; LRU would have evicted it for 3.
    assert demand(LeastFrequentlyUsed(4), [[0], [0], [1], [2], [3], [0]], capacity=2).hit == pytest.approx(2 / 6)
    assert demand(LeastRecentlyUsed(4), [[0], [0], [1], [2], [3], [0]], capacity=2).hit == pytest.approx(1 / 6)


def test_belady_by_hand() -> None:
    # With room for two, 2 must evict 1, which is used after 0.
    trace = one_layer_trace([[0], [1], [2], [0], [1]], experts=4)
    assert run("oracle", trace, 2).hit == pytest.approx(1 / 5)
    assert run("lru", trace, 2).hit == 0


def test_both_readings_of_the_papers_frequency() -> None:
    """After losing its slot an expert keeps its count, or starts anew."""
    # 0 is used three times, evicted by p = 0 elsewhere never: p decides first.
    for while_cached, kept in ((False, 4.0), (True, 1.0)):
        rule = ProbabilityFrequency(4, while_cached)
        rule.record_guidance(np.ones(4))
        for _ in range(3):
            rule.record_use([0])
        rule.record_eviction(0)
        assert rule.values(np.array([0])).tolist() == [kept]


def test_a_share_for_each_layer() -> None:
    manifest = sample_manifest(layers=2, experts=4, top_k=1)
    trace = sample_trace(1, 30, manifest)
    policy = PreparedOnDemand(LeastRecentlyUsed(manifest.keys), per_layer=True)
    misses = 0
    for layer in range(2):
        cache: OrderedDict[int, None] = OrderedDict()
        for iteration in range(30):
            misses += _lru_access(cache, int(trace.requests[0].routed(iteration, layer)[0]), room=2)
    assert Replay(trace, policy, SLOW, 5, False).run(warm_up=0).miss * 60 == pytest.approx(misses)


def _lru_access(cache: OrderedDict[int, None], key: int, room: int) -> bool:
    missed = key not in cache
    cache[key] = None
    cache.move_to_end(key)
    if len(cache) > room:
        cache.popitem(last=False)
    return missed


def guided(offer_at: int, expert: int, layers: int = 3) -> tuple[RoutingTrace, Guided]:
    """A trace of one token that uses ``expert`` in every layer, and a policy sure of it for the layers ahead."""
    manifest = sample_manifest(layers=layers, experts=2, top_k=1)
    trace = sample_trace(1, 1, manifest)
    request = replace(trace.requests[0], experts=np.full(layers, expert, dtype=np.int16))
    rows = np.zeros((1, layers, 2), dtype=np.float32)
    rows[:, :, expert] = 1.0
    nobody = np.full(1, -1)
    found = Guidance(rows, nobody, np.zeros(1), np.zeros((1, layers), dtype=np.int64), np.ones((1, layers)))
    policy = Guided(LeastRecentlyUsed(manifest.keys), lambda request: found, offer_at, 1, by_score=True)
    return RoutingTrace(manifest, (request,)), policy


def test_a_prefetch_moves_under_compute_and_is_late_by_the_rest() -> None:
    # Layer 0 misses: 1 s. Then 0.5 s until gate 1 move half of its expert; the wait is for the other half. So for 2.
    trace, policy = guided(offer_at=1, expert=1)
    outcome = Replay(trace, policy, SLOW, 3, False).run(warm_up=0)
    assert (outcome.hit * 3, outcome.late * 3, outcome.miss * 3) == pytest.approx((0, 2, 1))
    assert outcome.stall_seconds == pytest.approx(1.0 + 0.5 + 0.5)
    assert outcome.bytes_moved == pytest.approx(300)


def test_a_miss_waits_for_a_piece_that_has_begun() -> None:
    """With distance 2 the expert of layer 2 is half there when layer 1 misses; whole copies cannot be stopped."""
    trace, policy = guided(offer_at=2, expert=1)
    # Stopped at once: 1 + 1 s of misses, then 0.5 s more move before gate 2: all there.
    assert Replay(trace, policy, SLOW, 3, False).run(warm_up=0).stall_seconds == pytest.approx(2.0)
    trace, policy = guided(offer_at=2, expert=1)
    whole = replace(SLOW, chunk_bytes=100)
    assert Replay(trace, policy, whole, 3, False).run(warm_up=0).stall_seconds == pytest.approx(2.5)


def test_reading_in_place() -> None:
    # 0 is read at once, its copy moves 0.5 s before 0 is wanted again, still absent: it is read at half the rate
    # beside the copy (0.5 s of it in 1 s), which ends, and at the full rate for the other 0.5 s.
    outcome = demand(LeastRecentlyUsed(4), [[0], [0], [0]], capacity=2, in_place=True)
    assert (outcome.hit * 3, outcome.late * 3, outcome.miss * 3) == pytest.approx((1, 1, 1))
    assert outcome.stall_seconds == pytest.approx(1.0 + 1.0 + 0.5)
    assert outcome.bytes_moved == 300


def test_too_little_room_for_a_token_is_refused() -> None:
    trace = sample_trace(1, 2)
    with pytest.raises(BudgetError, match="room for 1 experts"):
        Replay(trace, PreparedOnDemand(LeastRecentlyUsed(32)), SLOW, 1, False)
    with pytest.raises(BudgetError, match="a layer"):
        Replay(trace, PreparedOnDemand(LeastRecentlyUsed(32), per_layer=True), SLOW, 7, False)


def test_the_warm_up_is_left_out() -> None:
    trace = one_layer_trace([[0], [1], [0], [1]], experts=4)
    outcome = Replay(trace, PreparedOnDemand(LeastRecentlyUsed(4)), SLOW, 2, False).run(warm_up=2)
    assert (outcome.iterations, outcome.hit, outcome.bytes_moved, outcome.stall_seconds) == (2, 1.0, 0, 0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), room=st.integers(8, 32), copy=st.sampled_from([0.01, 0.2, 3.0]))
def test_bytes_and_room_add_up(name: str, in_place: bool, seed: int, room: int, copy: float) -> None:
    """The replay itself checks link time and room; here what it reports must agree with it."""
    trace = sample_trace(2, 8, sample_manifest(hidden_size=5), seed)
    hardware = replace(SLOW, bandwidth=SLOW.expert_bytes / copy, chunk_bytes=30)
    outcome = run(name, trace, room, hardware, in_place)
    assert outcome.hit + outcome.late + outcome.miss == pytest.approx(1)
    assert outcome.routed == trace.accesses
    assert outcome.bytes_moved >= outcome.miss * outcome.routed * hardware.expert_bytes - 1e-6
    assert outcome.seconds == pytest.approx(16 * 4 * 0.5 + outcome.stall_seconds)


@pytest.mark.parametrize("make", [LeastRecentlyUsed, LeastFrequentlyUsed, ProbabilityFrequency])
@given(seed=st.integers(0, 10_000), room=st.integers(2, 12))
def test_residents_evict_what_the_engines_cache_evicts(make: type[EvictionRule], seed: int, room: int) -> None:
    """One expert a layer, so that neither has to choose between experts used at the same moment."""
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(16)).astype(np.float32)
    rules = [make(16), make(16)]
    cache, residents = ExpertCache(16, room, rules[0]), Residents(rules[1], 16, room)
    for rule in rules:
        rule.record_guidance(probabilities)
    for key in rng.integers(0, 16, size=60).tolist():
        cache.record_use([key])
        rules[1].record_use([key])
        if residents.holds(key):
            residents.touch([key])
        else:
            residents.admit([key], [key])
            cache.reserve(key)
            cache.commit(key)
        assert {k for k in range(16) if residents.holds(k)} == set(cache.resident_keys())


def test_more_experts_in_a_layer_than_room_take_turns() -> None:
    residents = Residents(LeastRecentlyUsed(16), 16, 3)
    residents.admit([0, 1, 2, 3, 4], pinned=[0, 1, 2, 3, 4])
    assert [k for k in range(16) if residents.holds(k)] == [2, 3, 4]


def test_speculation_never_evicts_what_is_worth_more() -> None:
    rule = LeastFrequentlyUsed(4)
    residents = Residents(rule, 4, 1)
    rule.record_use([0])
    residents.admit([0], [0])
    assert not residents.admit_speculatively(1, rule.speculative_value(1, 0.9), pinned=())
    assert residents.holds(0)


def test_bounds_bound() -> None:
    trace = sample_trace(6, 30)
    quick = replace(SLOW, bandwidth=2000.0)
    outcomes = {name: run(name, trace, 16, quick) for name in NAMES}
    online = min(outcomes[name].tpot_seconds for name in ONLINE)
    assert outcomes["perfect"].tpot_seconds < online
    assert outcomes["oracle"].hit == max(outcomes[n].hit for n in ("oracle", "lru", "lfu", "lru-layer"))


def test_presets_are_joined_names() -> None:
    assert preset("h200/qwen1.5").copy_seconds == pytest.approx(0.33e-3, rel=0.05)
    assert preset("h200/mixtral").copy_seconds == pytest.approx(6.4e-3, rel=0.01)

"""Each policy of the field against the rule its own paper states, by an example small enough to work out by hand.

Two layers of four experts, one a token, unless an example says otherwise. Stored request A uses expert 0 and then
expert 1, stored request B expert 2 and then expert 3; what is tested resembles one or the other.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.hardware import Hardware
from engine.policy_names import PolicyFactory
from engine.replay import Replay
from engine.traces import RoutingTrace, TraceManifest
from tests.engine.sample_traces import decode_request, one_layer_trace

# One expert takes 1 s over the link, a layer 0.5 s to compute.
SLOW = Hardware(expert_bytes=100, bandwidth=100.0, latency=0.0, layer_seconds=0.5, chunk_bytes=0)

A = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1]]
B = [[0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7]]
EAST, WEST = [1.0, 0.0], [0.0, 1.0]


def trace(
    *requests: list[list[list[float]]], embeddings: list[list[list[float]]] | None = None, top_k: int = 1
) -> RoutingTrace:
    """Requests written as the gate distributions [T, L, J] of their iterations; the likeliest experts are routed."""
    _, layers, experts = np.shape(requests[0])
    manifest = TraceManifest("by hand", layers, experts, top_k, "full", embeddings and 2, None, "by hand")
    made = []
    for number, maps in enumerate(requests):
        distributions = np.array(maps, dtype=np.float16)
        chosen = (-distributions).argsort(axis=2, kind="stable")[..., :top_k]
        directions = None if embeddings is None else np.array(embeddings[number], dtype=np.float32)
        made.append(decode_request(number, chosen, distributions, directions))
    return RoutingTrace(manifest, tuple(made))


def offered(name: str, store: RoutingTrace, test: RoutingTrace, distance: int = 1) -> list[list[list[tuple[int, int]]]]:
    """For each iteration of a test's only request the (layer, expert) asked for before gate 0 and after each gate."""
    policy = PolicyFactory(store, test, distance, 100, SLOW).build(name)
    (request,) = test.requests
    policy.begin_request(request, 0)
    everything = []
    for iteration, layers in enumerate(request.keys(test.manifest.experts)):
        moments = [policy.begin_iteration(iteration)]
        for layer, keys in enumerate(layers):
            policy.rule.record_use(keys)
            moments.append(policy.observe(iteration, layer))
        everything.append([sorted(divmod(p.key, test.manifest.experts) for p in moment) for moment in moments])
    return everything


def hits(name: str, uses: list[int], room: int, store: RoutingTrace | None = None) -> list[bool]:
    """Which uses of a model of one layer find their expert in the cache; each use is replayed after those before it."""
    found = []
    for until in range(1, len(uses) + 1):
        test = one_layer_trace([[use] for use in uses[:until]], experts=4)
        policy = PolicyFactory(store or test, test, 1, 100, SLOW).build(name)
        found.append(round(Replay(test, policy, SLOW, room, False).run(warm_up=0).hit * until))
    return np.diff([0, *found]).astype(bool).tolist()


def test_policy_of_deepspeed_inference_with_a_cache() -> None:
    """lru: nothing is loaded ahead; the expert whose use lies furthest back makes room."""
    # 2 takes the room of 1, whose use lies before that of 0; so 0 is found again and 1 is not.
    assert hits("lru", [0, 1, 0, 2, 0, 1], room=2) == [False, False, True, False, True, False]
    assert offered("lru", trace([A], [B]), trace([A, A]))[1] == [[], [], []]


def test_policy_of_a_share_for_each_layer() -> None:
    """lru-layer: a layer never loses its experts to another one."""
    # Layer 0 uses 0 for ever, layer 1 uses 0, 1, 2 in turn: with two places each, layer 0 misses once.
    wandering = [[[1.0, 0, 0, 0], np.eye(4)[t % 3].tolist()] for t in range(6)]
    test = trace(wandering)
    outcome = {}
    for name in ("lru", "lru-layer"):
        policy = PolicyFactory(test, test, 1, 100, SLOW).build(name)
        outcome[name] = Replay(test, policy, SLOW, 4, False).run(warm_up=0).hit * 12
    assert outcome["lru-layer"] == pytest.approx(5)
    # Four places for all: 0 of layer 0 and the three of layer 1 fit together.
    assert outcome["lru"] == pytest.approx(5 + 3)


def test_policy_of_the_least_frequent_use() -> None:
    """lfu: the expert used least often makes room, however recent that was."""
    # 0 has been used three times when 2 comes: 1, used once, goes, though its use is the latest.
    assert hits("lfu", [0, 0, 0, 1, 2, 0, 1], room=2) == [False, True, True, False, False, True, False]


def test_policy_of_on_demand_loading() -> None:
    """on-demand: the expert that came first makes room, used since or not."""
    # 0 came first and goes for 2, though it has just been used; recency would have kept it.
    assert hits("on-demand", [0, 1, 0, 2, 0, 1], room=2) == [False, False, True, False, False, False]
    assert hits("lru", [0, 1, 0, 2, 0, 1], room=2) == [False, False, True, False, True, False]


@pytest.mark.parametrize(("name", "start"), [("moe-infinity", [(0, 2), (1, 3)]), ("hit-count", [(0, 2)])])
def test_policy_of_moe_infinity(name: str, start: list[tuple[int, int]]) -> None:
    """The request's activation counts so far find the stored request most like it, whose counts are prefetched.

    moe-infinity has it guide the whole iteration; hit-count, the ablation of the FineMoE paper, the layers up to d,
    and layer l + d after gate l.
    """
    offers = offered(name, trace([A, A], [B, B, B]), trace([B, A, A, A]))
    # Nothing is known before the first iteration.
    assert offers[0] == [[], [], []]
    # Counts of one B are in proportion to those of the second stored request.
    assert offers[1][0] == start
    assert offers[1][1] == ([] if name == "moe-infinity" else [(1, 3)])
    # After B, A, A: cosine 2/sqrt(5) with the first stored request, 1/sqrt(5) with the second.
    assert offers[3][0] == ([(0, 0), (1, 1)] if name == "moe-infinity" else [(0, 0)])


def test_policy_of_moe_infinity_evicts_by_count() -> None:
    assert hits("moe-infinity", [0, 0, 0, 1, 2, 0, 1], room=2) == hits("lfu", [0, 0, 0, 1, 2, 0, 1], room=2)


def test_policy_of_the_trajectory_alone() -> None:
    """map-t: gate l finds the map with the likest beginning, whose K likeliest experts of layer l + d are asked for."""
    offers = offered("map-t", trace([A], [B]), trace([A, B]))
    assert offers[0] == [[], [(1, 1)], []]
    assert offers[1] == [[], [(1, 3)], []]
    # With d = 2 = L nothing is left to guide: the layer after the last is another iteration's.
    assert offered("map-t", trace([A], [B]), trace([A, B]), distance=2)[0] == [[], [], []]


def test_policy_of_trajectory_and_semantics() -> None:
    """map-t+s: before the first gate the map of the likest embedding guides layers 0..d-1."""
    store = trace([A], [B], embeddings=[[EAST], [WEST]])
    offers = offered("map-t+s", store, trace([A], embeddings=[[[0.1, 0.9]]]))
    # The embedding says B, then the first gate says A: layer 0 is guided by the one, layer 1 by the other.
    assert offers == [[[(0, 2)], [(1, 1)], []]]


def test_policy_of_trajectory_semantics_and_delta() -> None:
    """map-t+s+delta: experts are taken until their probabilities reach 1 - score, and at least K."""
    store = trace([[[0.45, 0.3, 0.15, 0.1]] * 2], embeddings=[[EAST]])
    # Cosine 0.6, so delta = 0.4: the first expert has more.
    assert offered("map-t+s+delta", store, trace([A], embeddings=[[[0.6, 0.8]]]))[0][0] == [(0, 0)]
    # Cosine 0.28, so delta = 0.72 and 0.45 alone falls short of it; with 0.3 it does not.
    assert offered("map-t+s+delta", store, trace([A], embeddings=[[[0.28, 0.96]]]))[0][0] == [(0, 0), (0, 1)]
    # Without delta it is one, K, in either case.
    assert offered("map-t+s", store, trace([A], embeddings=[[[0.28, 0.96]]]))[0][0] == [(0, 0)]


@pytest.mark.parametrize(("name", "victim"), [("finemoe", 1), ("finemoe-cached-freq", 0)])
def test_policy_of_finemoe(name: str, victim: int) -> None:
    """The highest 1 / (p * freq) goes first; freq counts all uses, or those since the expert was last loaded."""
    store = trace([[[0.3, 0.4, 0.2, 0.1]]], embeddings=[[EAST]])
    policy = PolicyFactory(store, trace([[A[0]]], embeddings=[[EAST]]), 1, 100, SLOW).build(name)
    policy.begin_request(trace([[A[0]]], embeddings=[[EAST]]).requests[0], 0)
    policy.begin_iteration(0)
    rule = policy.rule
    # Expert 0: used twice, evicted, loaded again and used once; expert 1: used once. freq begins at 1.
    for _ in range(2):
        rule.record_use([0])
    rule.record_eviction(0)
    rule.record_use([0, 1])
    # p * freq: 0.3 * 4 = 1.2 or 0.3 * 2 = 0.6 for expert 0, 0.4 * 2 = 0.8 for expert 1.
    values = rule.values(np.array([0, 1]))
    assert values == pytest.approx([1.2 if name == "finemoe" else 0.6, 0.8], rel=1e-3)
    assert int(values.argmin()) == victim


def test_policy_of_finemoe_prefetches_as_its_ablation() -> None:
    store = trace([A], [B], embeddings=[[EAST], [WEST]])
    test = trace([A, B], embeddings=[[[0.1, 0.9], [0.8, 0.2]]])
    for name in ("finemoe", "finemoe-cached-freq"):
        assert offered(name, store, test) == offered("map-t+s+delta", store, test)


def test_policy_of_belady() -> None:
    """oracle: the expert whose next use lies furthest ahead makes room."""
    # 2 takes the room of 1, which is used after 0: 0 is found again. LRU would have kept 1.
    test = one_layer_trace([[0], [1], [2], [0], [1]], experts=4)
    policy = PolicyFactory(test, test, 1, 100, SLOW).build("oracle")
    assert Replay(test, policy, SLOW, 2, False).run(warm_up=0).hit == pytest.approx(1 / 5)


def test_policy_of_perfect_knowledge() -> None:
    """perfect: what follows is asked for in the order of its use, up to a whole iteration ahead."""
    offers = offered("perfect", trace([A], [B]), trace([A, B]))
    assert offers[0][0] == [(0, 0), (1, 1)]
    # After gate 0 the next two layers are layer 1 of this iteration and layer 0 of the next.
    assert offers[0][1] == [(0, 2), (1, 1)]
    assert offers[1][1:] == [[(1, 3)], []]

"""``adaptive``: what experts are worth, what is fetched, how settings are chosen, and both forms of the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.adaptive import Adaptive, AdaptiveSettings, PreparedAdaptive
from engine.adaptive_choice import AdaptiveFit
from engine.errors import PolicyError
from engine.expected_use import ExpectedUse, missing_rest, raise_values
from engine.hardware import Hardware
from engine.observations import ObservedGate, ObservedIteration
from engine.policy_names import PolicyFactory
from engine.predictors.fitting import fit_predictors
from engine.predictors.online import OnlinePredictors
from engine.replay import Replay, ReplayOutcome
from engine.streamed import Streamed
from engine.traces import RoutingTrace
from tests.engine.sample_traces import decode_request, gated_trace, sample_manifest, sample_trace

# One expert takes 0.1 s over the link, a layer 0.05 s to compute.
MACHINE = Hardware(expert_bytes=100, bandwidth=1000.0, latency=0.0, layer_seconds=0.05, chunk_bytes=0)
SETTINGS = AdaptiveSettings(discount=0.75, threshold=0.4, depth=2)


def test_nearer_visits_are_worth_more() -> None:
    rule = ExpectedUse(3, 1, discount=0.6)
    rule.worth[:] = 1.0
    rule.move(0)
    # After gate 0 come layers 1, 2, and then 0 of the next token.
    assert rule.values(np.arange(3)).tolist() == pytest.approx([0.6, 0.6 ** (1 / 3), 0.6 ** (2 / 3)])


def test_the_rule_knows_what_is_absent() -> None:
    rule = ExpectedUse(1, 3, discount=0.6)
    rule.record_load(0)
    rule.record_load(2)
    rule.record_eviction(0)
    assert rule.absent == [True, True, False]


def test_a_price_is_asked_of_what_is_absent() -> None:
    rule = ExpectedUse(1, 2, discount=1.0, price=0.25)
    rule.worth[:] = 0.5
    rule.record_load(0)
    assert [rule.values(np.array([key]))[0] for key in (0, 1)] == [0.5, 0.25]
    assert rule.speculative_value(1, 0.9) == 0.25


def test_the_allowance_is_what_recency_would_have_missed() -> None:
    rule = ExpectedUse(1, 4, discount=1.0, capacity=2)
    rule.record_use([0])
    rule.record_use([1])
    assert rule.has_allowance
    for key in (0, 1):
        rule.record_load(key)
    assert not rule.has_allowance
    # Recency has 0 and 1: only 2 is missed.
    rule.record_use([0])
    rule.record_use([1])
    assert not rule.has_allowance
    rule.record_use([2])
    assert rule.has_allowance
    assert ExpectedUse(1, 4, discount=1.0).has_allowance


def test_what_loads_more_than_recency_becomes_recency() -> None:
    """0 is worth nothing and always used; keeping what is worth most instead loads it anew each time."""
    rule = ExpectedUse(1, 3, discount=1.0, capacity=2)
    rule.worth[0] = [0.0, 0.5, 0.9]
    rule.record_use([1])
    rule.record_use([0])
    assert rule.values(np.array([1, 2])).argmax() == 1
    for _ in range(20):
        rule.record_use([0])
        rule.record_load(0)
    rule.record_use([0])
    assert rule.values(np.array([0, 1, 2])).argsort().tolist() == [2, 1, 0]
    assert rule.speculative_value(2, 0.9) < rule.values(np.array([2]))[0]
    while not rule.has_allowance:
        # Everything is new to recency, and is loaded by it.
        rule.record_use([0, 1, 2])
    assert rule.values(np.array([1, 2])).argmax() == 1


def test_knowledge_raises_a_value_and_never_lowers_it() -> None:
    # Value 0.5 of which 0.2 is the next visit: 0.8 of the time the rest, 0.375, remains.
    values, upcoming = np.array([0.5, 0.5, 0.5]), np.array([0.2, 0.2, 0.2])
    raised = raise_values(values, upcoming, missing_rest(values, upcoming), np.array([0.1, 0.6, 1.0]))
    assert raised.tolist() == pytest.approx([0.5, 0.6 + 0.4 * 0.375, 1.0])


@pytest.mark.parametrize("capacity", [6, 16])
def test_both_forms_decide_alike(capacity: int) -> None:
    store, test = gated_trace(10, 30, seed=1), gated_trace(8, 40, seed=2)
    predictors = fit_predictors(store, depth=3)
    prepared = PreparedAdaptive(4, 8, MACHINE, capacity, SETTINGS, OnlinePredictors(predictors).forecast)
    live = Streamed(Adaptive(predictors, SETTINGS, MACHINE, capacity), 8)
    assert replay(test, prepared, capacity) == replay(test, live, capacity)


def replay(trace: RoutingTrace, policy: PreparedAdaptive | Streamed, capacity: int) -> ReplayOutcome:
    return Replay(trace, policy, MACHINE, capacity, in_place=False).run(0)


def test_sequences_of_a_batch_are_guided_together() -> None:
    """What one of them is likely to use is fetched, for both."""
    predictors = fit_predictors(gated_trace(10, 30, seed=1), depth=3)
    requests = gated_trace(2, 3, seed=2).requests
    settings = replace(SETTINGS, threshold=0.0)

    def offers(rows: list[int]) -> list[dict[int, float]]:
        policy = Adaptive(predictors, settings, None, None)
        embeddings = np.stack([requests[r].embeddings[0] for r in rows])
        said = [policy.begin(ObservedIteration(0, "decode", tuple(rows), embeddings))]
        maps, uses = (np.stack([f(requests[r])[0] for r in rows]) for f in (lambda q: q.maps(8), lambda q: q.uses(8)))
        inputs = np.stack([requests[r].gate_inputs[0] for r in rows])
        said += [policy.observe(ObservedGate(0, maps[:, 0], uses[:, 0], inputs[:, 0]))]
        return [{prefetch.key: prefetch.probability for prefetch in offer} for offer in said]

    for one, other, both in zip(offers([0]), offers([1]), offers([0, 1]), strict=True):
        assert both == pytest.approx({key: 1 - (1 - one[key]) * (1 - other[key]) for key in one}, abs=1e-6)


def test_adaptive_beats_recency_where_one_kind_of_token_follows_another() -> None:
    """Six kinds of tokens take turns: recency always evicts what is used next, the store knows what follows."""
    manifest = sample_manifest()
    kinds = np.random.default_rng(0).random((6, 4, 8)).argsort(axis=2)[..., :2]
    requests = tuple(decode_request(n, kinds[(n + np.arange(60)) % 6]) for n in range(20))
    store, test = RoutingTrace(manifest, requests[:14]), RoutingTrace(manifest, requests[14:])
    factory = PolicyFactory(store, test, 3, 400, MACHINE)
    tpot = {n: Replay(test, factory.build(n, 16), MACHINE, 16, False).run(0).tpot_seconds for n in ("lru", "adaptive")}
    assert tpot["adaptive"] < 0.8 * tpot["lru"]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("capacity", [3, 8, 20])
def test_adaptive_does_not_lose_to_recency_on_a_random_walk(capacity: int, in_place: bool) -> None:
    store, test = sample_trace(12, 40, seed=1), sample_trace(6, 40, seed=2)
    factory = PolicyFactory(store, test, 3, 400, MACHINE)
    outcomes = {
        name: Replay(test, factory.build(name, capacity, in_place), MACHINE, capacity, in_place).run(20)
        for name in ("lru", "adaptive")
    }
    assert outcomes["adaptive"].tpot_seconds <= outcomes["lru"].tpot_seconds
    assert outcomes["adaptive"].bytes_moved <= 1.05 * outcomes["lru"].bytes_moved


def test_settings_are_chosen_on_the_store_alone() -> None:
    fit = AdaptiveFit(sample_trace(12, 40, seed=1))
    assert fit.settings(MACHINE, 16, False) == AdaptiveFit(sample_trace(12, 40, seed=1)).settings(MACHINE, 16, False)


def test_requests_of_one_decode_step_tell_nothing_of_the_next() -> None:
    """Beside longer ones they are known as any, wherever they lie; alone they are refused in a line."""
    short, long = sample_trace(30, 1, seed=1).requests, sample_trace(35, 6, seed=2).requests[30:]
    mixed = AdaptiveFit(RoutingTrace(sample_manifest(), (*short, *long)))
    assert mixed.plan(MACHINE, 16).capacity == 16
    for requests in (short, ()):
        with pytest.raises(PolicyError, match="longer answers"):
            AdaptiveFit(RoutingTrace(sample_manifest(), requests)).plan(MACHINE, 16)


def test_a_plan_without_hardware_takes_middling_settings() -> None:
    fit = AdaptiveFit(sample_trace(6, 20, seed=1))
    assert fit.plan(None).settings == fit.plan(None, 16).settings
    assert fit.plan(MACHINE, 16).settings == fit.settings(MACHINE, 16, False)

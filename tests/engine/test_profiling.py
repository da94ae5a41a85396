"""Measuring on the real engine, and choosing by replays whose answer can be told beforehand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.budget import ExpertBudget
from engine.decisions import fill_library, measure_decisions
from engine.engine import Engine
from engine.hardware import Hardware
from engine.live_policies import PolicyInputs
from engine.machine import device_memory_bytes, host_memory_bytes, identify_machine
from engine.measuring import (
    CopySample,
    LinkMeasure,
    measure_checkpoint_read,
    measure_host_read,
    measure_layer,
    measure_link,
)
from engine.planning import BudgetOutlook, Choice, Expectation, Planner, find_enough, replay_again
from engine.policy_names import POLICIES
from engine.predictors.fitting import fit_predictors
from engine.recall import measure_recall
from engine.replay import ReplayOutcome
from engine.source import resolve_model
from engine.steps import GenerationSettings
from engine.trace_files import TraceWriter, read_trace
from engine.traces import RoutingTrace, TraceManifest
from store.index import ResidentIndex
from tests.engine.sample_traces import decode_request, read_by_gates, sample_manifest, sample_trace

SLOW_LINK = Hardware(expert_bytes=1_000_000, bandwidth=1e9, latency=0.0, layer_seconds=1e-3, chunk_bytes=0)


def test_measuring_a_running_engine(tmp_path: Path) -> None:
    source = resolve_model("demo")
    shape = source.fingerprint
    manifest = TraceManifest(
        "demo", shape.layers, shape.experts, shape.top_k, "full", shape.hidden_size, shape.to_dict(), "a test"
    )
    with (
        TraceWriter(tmp_path / "t.parquet", manifest) as trace,
        Engine.open(source, cache=ExpertBudget.parse("25%"), device="cpu", trace=trace) as engine,
    ):
        link = measure_link(engine.host, engine.device)
        layer = measure_layer(engine, seconds=0.0)
        host_rate = measure_host_read(engine.host)
        list(engine.generate([[5, 6, 7]], GenerationSettings(3, ignore_eos=True)))
        expert = engine.host.layout(0).nbytes
    assert [sample.bytes for sample in link.samples] == [4096, 16384, 65536, expert]
    assert all(sample.seconds > 0 and sample.copies >= 3 for sample in link.samples)
    assert layer.layer_seconds == pytest.approx(layer.experts_seconds + layer.attention_seconds)
    assert 0 < layer.experts_seconds < layer.layer_seconds
    assert layer.expert_seconds > 0
    # The budget holds two tokens' experts, so there were steps without a load.
    assert layer.steps >= 3
    assert not layer.stall_subtracted
    assert host_rate > 0
    # Only what was generated outside of the measurement is recorded.
    assert [len(request) for request in read_trace(tmp_path / "t.parquet").requests] == [3]


def test_a_budget_below_one_token_has_its_waiting_taken_out() -> None:
    source = resolve_model("demo")
    with Engine.open(source, cache=ExpertBudget.parse("10%"), device="cpu") as engine:
        assert measure_layer(engine, seconds=0.0).stall_subtracted


def test_reading_a_checkpoint() -> None:
    assert measure_checkpoint_read(resolve_model("demo")) > 0


def test_the_line_goes_through_the_smallest_copy_and_a_whole_expert() -> None:
    measure = LinkMeasure.of([CopySample(1000, 2e-6, 9), CopySample(4000, 9e-6, 9), CopySample(11000, 12e-6, 9)])
    assert (measure.latency_seconds, measure.bandwidth) == (2e-6, pytest.approx(1e9))
    # Noise can make the larger copy the faster one: then nothing is latency.
    noisy = LinkMeasure.of([CopySample(1000, 5e-6, 9), CopySample(11000, 5e-6, 9)])
    assert (noisy.latency_seconds, noisy.bandwidth) == (0.0, pytest.approx(2.2e9))


def test_this_machine() -> None:
    machine = identify_machine(torch.device("cpu"), torch.bfloat16)
    assert (machine.device, machine.link, machine.dtype) == ("cpu", "memory", "bfloat16")
    assert machine.cores >= 1
    assert machine.memory_gib == host_memory_bytes() >> 30
    assert device_memory_bytes(torch.device("cpu")) == host_memory_bytes()
    assert machine == identify_machine(torch.device("cpu"), torch.bfloat16)


def test_recall_of_a_test_that_the_store_has_seen() -> None:
    trace = sample_trace(4, 20, sample_manifest(hidden_size=6))
    recall = {(r.predictor, r.distance): r for r in measure_recall(fit_predictors(trace), trace, [1, 3, 9])}
    told = {"mix", "trajectory", "own-trajectory", "trajectory-best", "semantic-best", "semantic", "own-semantic"}
    told |= {"popularity", "recency-0.85", "activation-counts", "embedding-ridge"}
    assert set(recall) == {(predictor, distance) for predictor in told for distance in (1, 3)}
    # The best map is the very iteration; L = 4, K = 2, and 19 iterations of each request count.
    assert recall["semantic-best", 3].recall == recall["trajectory-best", 3].recall == 1.0
    assert (recall["popularity", 1].routed, recall["mix", 3].routed) == (76 * 3 * 2, 76 * 1 * 2)
    assert recall["mix", 1].recall > recall["popularity", 1].recall


def test_recall_by_popularity_and_recency_counted_by_hand() -> None:
    manifest = sample_manifest(layers=2, experts=4, top_k=1)
    stored = np.array([[[0], [0]], [[0], [0]], [[1], [1]]])
    store = RoutingTrace(manifest, tuple(decode_request(n, stored) for n in range(2)))
    test = RoutingTrace(manifest, (decode_request(9, np.array([[[0], [0]], [[2], [2]], [[2], [2]], [[0], [0]]])),))
    recall = {r.predictor: (r.recall, r.routed) for r in measure_recall(fit_predictors(store), test, [1])}
    # Of the last three steps popular expert 0 is used in the third; expert 2 is not yet recent enough by then.
    assert recall["popularity"] == (1 / 3, 3)
    assert recall["recency-0.85"] == (1 / 3, 3)
    assert "semantic-best" not in recall


def test_recall_with_what_gates_read() -> None:
    trace = read_by_gates(sample_trace(4, 20))
    recall = {(r.predictor, r.distance): r.recall for r in measure_recall(fit_predictors(trace), trace, [1])}
    # The inputs are the same in every layer and the weights are the gates' own: the next gate is known exactly.
    assert recall["gate", 1] == 1.0
    assert recall["ridge", 1] > 0.9


def test_the_choice_is_the_fastest_and_its_reason_names_what_it_was_held_against() -> None:
    store, test = sample_trace(8, 30, seed=1), sample_trace(3, 30, seed=2)
    planner = Planner(store, test, SLOW_LINK, 200)
    choice = planner.choose([1, 2], 12)
    runnable = [e for e in choice.policies if e.policy not in ("moe-infinity", "hit-count", "lru-layer")]
    least = min(e.outcome.stall_seconds for e in runnable)
    chosen = next(e for e in choice.policies if e.policy == choice.policy)
    assert chosen.outcome.stall_seconds <= 1.01 * least
    assert [e.distance for e in choice.curve] == [1, 2]
    assert choice.distance in (1, 2)
    assert choice.reason.startswith(f"{choice.policy} waits ")
    assert "lru waits" in choice.reason
    assert {"oracle", "perfect"}.isdisjoint(e.policy for e in choice.policies)
    # Only the held-out steps count, whatever warmed the cache.
    assert all(e.outcome.iterations == test.iterations for e in choice.policies)


def test_decisions_count_against_a_policy() -> None:
    planner = Planner(sample_trace(8, 30, seed=1), sample_trace(3, 30, seed=2), SLOW_LINK, 200)
    planner.decisions = {policy.name: 1.0 for policy in POLICIES if policy.name != "lfu"}
    choice = planner.choose([1, 2], 12)
    assert choice.policy == "lfu"
    assert "lfu waits" in choice.reason
    lru = next(e for e in choice.policies if e.policy == "lru")
    assert lru.tpot_seconds == lru.outcome.tpot_seconds + 1.0


def test_decisions_are_timed_for_every_policy_that_can_be_built() -> None:
    trace = sample_trace(4, 10, sample_manifest(hidden_size=6))
    library = ResidentIndex(4, 8, 6)
    fill_library(library, trace)
    assert len(library) == 40
    found = measure_decisions(("lru", "finemoe", "promoe", "perfect"), PolicyInputs(4, 8, 2, 2, library=library), trace)
    assert set(found) == {"lru", "finemoe"}
    assert all(seconds > 0 for seconds in found.values())


def test_where_nothing_waits_the_simplest_policy_is_chosen() -> None:
    planner = Planner(sample_trace(8, 30, seed=1), sample_trace(3, 30, seed=2), SLOW_LINK, 200)
    choice = planner.choose([1, 2], planner.experts)
    assert choice.policy == "lru"
    assert [e.policy for e in choice.curve] == ["finemoe", "finemoe"]


def test_an_outlook_of_a_budget() -> None:
    planner = Planner(sample_trace(8, 30, seed=1), sample_trace(3, 30, seed=2), SLOW_LINK, 200)
    choice = Choice("lru", 1, "", (), ())
    small, all_of_it = planner.look_at(0.05, choice), planner.look_at(1.0, choice)
    assert (small.capacity, small.chosen, small.bound) == (1, None, None)
    assert all_of_it.chosen is not None
    # Every expert has been loaded during the warm-up: what is left is computing, a millisecond a layer.
    assert all_of_it.chosen.tokens_per_second == pytest.approx(250)


def outlook(share: float, tokens_per_second: float | None) -> BudgetOutlook:
    if tokens_per_second is None:
        return BudgetOutlook(share, 0, None, None, None)
    outcome = ReplayOutcome(1, 1, 1.0, 0.0, 0.0, 0, 0, 0.0, 1 / tokens_per_second)
    return BudgetOutlook(share, 1, Expectation("lru", None, 1, outcome), None, None)


@pytest.mark.parametrize(
    ("speeds", "enough"),
    [
        # Twice 25 % gives 20 % more, twice 50 % gives 5 %.
        ([(0.25, 10.0), (0.5, 12.0), (1.0, 12.6)], 0.5),
        # Twice 30 % lies between two budgets: 60 % gives 10.8.
        ([(0.3, 10.0), (0.5, 10.6), (1.0, 11.6)], 0.3),
        # Twice 5 % gives nothing, for both thrash; but from 25 % on more memory pays.
        ([(0.05, 2.0), (0.1, 2.0), (0.25, 2.1), (0.5, 4.0), (1.0, 4.1)], 0.5),
        # Too small ones do not count; at all experts there is nothing more to be had.
        ([(0.25, None), (0.5, 10.0), (1.0, 20.0)], 1.0),
        ([(0.25, None)], None),
    ],
)
def test_more_memory_stops_paying(speeds: list[tuple[float, float | None]], enough: float | None) -> None:
    assert find_enough([outlook(*point) for point in speeds]) == enough


def test_what_follows_a_recording_is_replayed_on_a_warm_cache() -> None:
    trace = sample_trace(3, 10)
    warm = replay_again(trace, 1, SLOW_LINK, trace.manifest.keys)
    assert (warm.iterations, warm.hit) == (10, 1.0)
    assert replay_again(trace, 2, SLOW_LINK, 4).miss > 0

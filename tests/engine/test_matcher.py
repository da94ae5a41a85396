"""Guidance of the matcher against a brute-force reading of the paper's search and selection."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import FinemoeError
from engine.eviction import EvictionRule, ProbabilityFrequency
from engine.guided import MapGuided
from engine.matcher import Matcher
from engine.matcher_thread import MatcherThread
from engine.observations import reduce_tokens, routed_distribution
from engine.observer import Iteration, SequenceState, mean_embeddings
from engine.records import IterationRecord
from engine.transfer_queue import Prefetch
from store.index import ResidentIndex

L, J, K, H = 6, 8, 2, 5


IDS = np.array([[0, 1]])


class Guidance(ProbabilityFrequency):
    """Keeps what the eviction rule is told."""

    def __init__(self) -> None:
        super().__init__(L * J)
        self.told: list[np.ndarray] = []

    def record_guidance(self, probabilities: np.ndarray) -> None:
        self.told.append(probabilities.copy())


class Offers:
    """Keeps what the matcher sends to the transfer engine."""

    def __init__(self) -> None:
        self.calls: list[list[Prefetch]] = []

    def offer(self, prefetches: Sequence[Prefetch]) -> None:
        self.calls.append(list(prefetches))


def match(index: ResidentIndex, distance: int, sink: Offers | None = None, rule: EvictionRule | None = None) -> Matcher:
    policy = MapGuided(rule or ProbabilityFrequency(L * J), index, L, J, K, distance)
    return Matcher(policy, index, fake_layers(), sink or Offers())


def random_map(rng: np.random.Generator, rows: int | None = None) -> np.ndarray:
    shape = (L, J) if rows is None else (rows, J)
    return rng.dirichlet(np.full(J, 0.3), size=shape[0]).astype(np.float32)


def record(rng: np.random.Generator, sequence: int) -> IterationRecord:
    embedding = rng.normal(size=H).astype(np.float32)
    return IterationRecord(sequence, 0, "decode", "hash", 1, embedding, random_map(rng))


def fake_layers() -> list[Any]:
    return [SimpleNamespace(num_experts=J, top_k=K, score_function=lambda s: s.softmax(-1)) for _ in range(L)]


def make_iteration(number: int, batch: int, tokens: int = 1) -> Iteration:
    states = tuple(SequenceState(row, 100 + row, 0, f"p{row}", tokens) for row in range(batch))
    return Iteration(number, "decode" if tokens == 1 else "prefill", batch, tokens, states)


def filled_index(rng: np.random.Generator, count: int, distance: int) -> tuple[ResidentIndex, list[IterationRecord]]:
    index = ResidentIndex(L, J, H, capacity=64, distance=distance)
    records = [record(rng, i) for i in range(count)]
    index.publish(records)
    return index, records


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("distance", [1, 3, L - 1, L, L + 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_layer_is_guided_once_by_the_search_the_paper_names(distance: int, batch: int) -> None:
    rng = np.random.default_rng(distance * 10 + batch)
    index, records = filled_index(rng, 40, distance)
    sink = Offers()
    matcher = match(index, distance, sink)
    queries = rng.normal(size=(batch, H)).astype(np.float32)
    observed = np.stack([random_map(rng) for _ in range(batch)])

    matcher.begin(make_iteration(7, batch), queries)
    for layer in range(L):
        matcher.observe(layer, observed[:, layer], IDS.repeat(batch, 0))

    expected: dict[int, dict[int, float]] = {}
    stored = [r.probabilities.astype(np.float16).astype(np.float32) for r in records]
    for target in range(L):
        chosen: dict[int, float] = {}
        for b in range(batch):
            if target < distance:
                scores = [cosine(queries[b], r.embedding) for r in records]
            else:
                prefix = target - distance + 1
                scores = [cosine(observed[b, :prefix], m[:prefix]) for m in stored]
            best = int(np.argmax(scores))
            row, total, taken = stored[best][target], 0.0, 0
            for expert in np.argsort(-row, kind="stable"):
                if taken >= K and total >= 1 - scores[best]:
                    break
                chosen[int(expert)] = max(chosen.get(int(expert), 0.0), float(row[expert]))
                total, taken = total + float(row[expert]), taken + 1
        expected[target] = chosen

    guided = [prefetch for call in sink.calls for prefetch in call]
    by_layer: dict[int, dict[int, float]] = {layer: {} for layer in range(L)}
    for prefetch in guided:
        layer, expert = divmod(prefetch.key, J)
        assert prefetch.due == 7 * L + layer
        assert expert not in by_layer[layer], "a layer was guided twice"
        by_layer[layer][expert] = prefetch.probability
    assert by_layer == expected
    assert len(sink.calls) == 1 + max(0, L - distance)
    assert len(index) == 40 + batch


def test_eviction_learns_the_largest_probability_of_any_match() -> None:
    rng = np.random.default_rng(3)
    index, records = filled_index(rng, 10, 2)
    rule = Guidance()
    matcher = match(index, 2, rule=rule)
    matcher.begin(make_iteration(0, 2), np.stack([records[4].embedding, records[8].embedding]))
    stored = [records[i].probabilities.astype(np.float16).astype(np.float32) for i in (4, 8)]
    assert np.array_equal(rule.told[0], np.maximum(*stored).reshape(-1))


def test_an_empty_library_guides_nothing_and_still_learns() -> None:
    rng = np.random.default_rng(5)
    index = ResidentIndex(L, J, H, capacity=8, distance=3)
    sink = Offers()
    matcher = match(index, 3, sink)
    observed = random_map(rng)
    matcher.begin(make_iteration(0, 1), rng.normal(size=(1, H)).astype(np.float32))
    for layer in range(L):
        matcher.observe(layer, observed[layer : layer + 1], IDS)
    assert not sink.calls
    assert len(index) == 1
    assert np.allclose(index.probabilities(0), observed, atol=1e-3)


def test_an_iteration_cut_short_leaves_no_record() -> None:
    rng = np.random.default_rng(6)
    index, _ = filled_index(rng, 4, 3)
    matcher = match(index, 3)
    query = rng.normal(size=(1, H)).astype(np.float32)
    matcher.begin(make_iteration(0, 1), query)
    matcher.observe(0, random_map(rng, 1), IDS)
    matcher.begin(make_iteration(1, 1), query)
    for layer in range(L):
        matcher.observe(layer, random_map(rng, 1), IDS)
    assert len(index) == 5


def test_padding_and_ended_rows_enter_no_map_and_no_embedding() -> None:
    states = (SequenceState(0, 0, 0, "a", 3), SequenceState(2, 2, 0, "c", 1))
    iteration = Iteration(0, "prefill", 3, 3, states)
    probabilities = np.arange(9 * J, dtype=np.float32).reshape(9, J)
    reduced = reduce_tokens(probabilities, iteration)
    assert np.allclose(reduced[0], probabilities[0:3].mean(0))
    assert np.allclose(reduced[1], probabilities[8])
    rows = iteration.token_rows()
    assert rows is not None and rows.tolist() == [0, 1, 2, 8]
    embeddings = torch.randn(3, 3, H)
    means = mean_embeddings(embeddings, iteration)
    assert torch.allclose(means[0], embeddings[0].mean(0), atol=1e-6)
    assert torch.allclose(means[2], embeddings[2, 2], atol=1e-6)
    assert not means[1].any()


@pytest.mark.parametrize("guiding", [True, False])
def test_the_thread_hands_over_whole_iterations_whether_or_not_it_guides(guiding: bool) -> None:
    rng = np.random.default_rng(9)
    index = ResidentIndex(L, J, H, capacity=8, distance=3)
    layers = fake_layers()
    thread = MatcherThread(match(index, 3), layers, guiding)
    scores = torch.randn(L, 3, J)
    states = (SequenceState(0, 7, 0, "a", 1), SequenceState(2, 9, 0, "c", 1))
    embeddings = torch.tensor(rng.normal(size=(3, H)), dtype=torch.float32)
    thread.begin(Iteration(0, "decode", 3, 1, states), embeddings, None)
    for layer in range(L):
        hidden = scores[layer] if layer != 2 else None
        thread.decide(layer, hidden, np.array([[0, 1]] * 3), torch.tensor([[0.75, 0.25]] * 3))
    thread.drain()
    thread.close()
    expected = scores.softmax(-1).numpy()
    expected[2] = [0.75, 0.25, *[0.0] * (J - 2)]
    assert len(index) == 2
    for place, row in enumerate((0, 2)):
        assert np.allclose(index.probabilities(place), expected[:, row], atol=1e-3)


def test_a_decode_steps_embedding_keeps_a_share_of_the_context() -> None:
    rng = np.random.default_rng(11)
    sink, index = Offers(), ResidentIndex(L, J, H, capacity=8, distance=3)
    matcher = match(index, 3, sink)
    inputs = rng.normal(size=(3, 2, H)).astype(np.float32)
    maps = np.stack([random_map(rng, 2) for _ in range(L)])
    for step in range(3):
        states = tuple(SequenceState(row, 50 + row, step, "p", 1) for row in range(2))
        matcher.record(Iteration(step, "decode", 2, 1, states), inputs[step], maps)
    expected = inputs[0]
    for step in range(3):
        expected = inputs[0] if step == 0 else 0.3 * expected + 0.7 * inputs[step]
        scores = index.semantic_scores(expected)
        assert np.allclose([scores[row, 2 * step + row] for row in range(2)], 1, atol=1e-3)


def test_vectors_without_a_cosine_are_not_published() -> None:
    rng = np.random.default_rng(10)
    index = ResidentIndex(L, J, H, capacity=8, distance=3)
    matcher = match(index, 3)
    embeddings = rng.normal(size=(3, H)).astype(np.float32)
    embeddings[0] = 0
    maps = np.stack([random_map(rng, 3) for _ in range(L)])
    maps[1, 2] = np.nan
    matcher.record(make_iteration(0, 3), embeddings, maps)
    assert len(index) == 1
    assert np.allclose(index.probabilities(0), maps[:, 1], atol=1e-3)


def test_routing_weights_stand_in_for_an_unseen_router() -> None:
    spread = routed_distribution(np.array([[1, 3], [0, 2]]), np.array([[0.5, 1.5], [0.0, 0.0]]), 4)
    assert np.allclose(spread, [[0, 0.25, 0, 0.75], [0.25, 0.25, 0.25, 0.25]])


def test_the_thread_reports_a_failed_search_and_goes_on() -> None:
    class FailingLibrary(ResidentIndex):
        def semantic_scores(self, embeddings: np.ndarray) -> np.ndarray:
            raise FinemoeError("the library is broken")

    rng = np.random.default_rng(8)
    library = FailingLibrary(L, J, H, capacity=8, distance=3)
    library.publish([record(rng, 0)])
    thread = MatcherThread(match(library, 3), fake_layers(), guiding=True)
    thread.begin(make_iteration(0, 1), torch.randn(1, H), None)
    with pytest.raises(FinemoeError, match="broken"):
        thread.drain()
    thread.drain()
    thread.close()


def test_draining_after_the_end_waits_for_nothing() -> None:
    index = ResidentIndex(L, J, H, capacity=8, distance=3)
    thread = MatcherThread(match(index, 3), fake_layers(), guiding=True)
    thread.close()
    waiting = threading.Thread(target=thread.drain, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()

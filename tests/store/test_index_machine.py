"""Any interleaving of publications and searches leaves the resident index equal to a plain model of it."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from store.index import ResidentIndex
from store.rows import MapRows, round_records
from tests.store.samples import EXPERTS, HIDDEN, LAYERS, cosines, make_record, prefix_cosines, redundancies

TOLERANCE = 2e-6


class IndexMachine(RuleBasedStateMachine):
    """The model is a dictionary of rounded maps; it checks each victim and then follows the index's choice."""

    @initialize(capacity=st.integers(1, 9), distance=st.integers(1, LAYERS + 1))
    def start(self, capacity, distance):
        self.index = ResidentIndex(LAYERS, EXPERTS, HIDDEN, capacity, distance)
        self.capacity, self.distance = capacity, distance
        self.model: dict[str, MapRows] = {}
        self.sequences = 0
        self.searched = None
        self.scan, self.observed = None, 0

    def stored(self) -> MapRows:
        rows = [self.model[key] for key in self.index.keys]
        return MapRows(
            self.index.keys,
            np.concatenate([np.empty((0, HIDDEN), np.float16)] + [row.embeddings for row in rows]),
            np.concatenate([np.empty((0, LAYERS, EXPERTS), np.float16)] + [row.maps for row in rows]),
        )

    @rule(seed=st.integers(0, 20), layers=st.integers(0, LAYERS))
    def search(self, seed, layers):
        """Begin an iteration and observe some of its layers."""
        record = make_record(0, seed=seed)
        stored = self.stored()
        semantic = self.index.semantic_scores(record.embedding[None])
        np.testing.assert_allclose(semantic, cosines(record.embedding[None], stored.embeddings), atol=TOLERANCE)
        self.scan, self.observed = self.index.start_trajectory(1), 0
        self.searched = (record, semantic, len(stored))
        for _ in range(layers):
            self.observe()

    @precondition(lambda self: self.scan is not None and self.observed < LAYERS)
    @rule()
    def observe(self):
        record, _, found = self.searched
        self.trajectory = self.scan.observe(record.probabilities[None, self.observed])
        self.observed += 1
        expected = prefix_cosines(record.probabilities[None], self.stored().maps[:found], self.observed)
        np.testing.assert_allclose(self.trajectory, expected, atol=TOLERANCE)

    @precondition(lambda self: self.scan is not None and self.observed == LAYERS)
    @rule()
    def publish_what_was_searched(self):
        record, semantic, _ = self.searched
        self.insert([record], semantic, self.trajectory)
        self.scan = None

    @rule(seeds=st.lists(st.integers(0, 20), min_size=1, max_size=5))
    def publish(self, seeds):
        self.insert([make_record(0, seed=seed) for seed in seeds])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def publish_again(self, data):
        key = data.draw(st.sampled_from(sorted(self.model)))
        rows = round_records([make_record(1)], [key], LAYERS, EXPERTS, HIDDEN)
        assert self.index.insert(rows) == [None]
        self.model[key] = rows

    def insert(self, records, semantic=None, trajectory=None):
        keys = [f"s{self.sequences + i}" for i in range(len(records))]
        self.sequences += len(records)
        rows = round_records(records, keys, LAYERS, EXPERTS, HIDDEN)
        before = self.stored()
        redundancy = redundancies(rows, before, self.distance)
        replaced = self.index.insert(rows, semantic, trajectory)
        taken: set[str] = set()
        for i, gone in enumerate(replaced):
            if gone is None:
                assert len(self.model) < self.capacity
            else:
                assert len(self.model) == self.capacity
                self.check_victim(gone, before, redundancy[i], taken, len(records))
                del self.model[gone]
                taken.add(gone)
            self.model[keys[i]] = rows[i : i + 1]

    def check_victim(self, gone, before, redundancy, taken, newcomers):
        assert gone not in taken
        if newcomers <= self.capacity:
            free = [score for key, score in zip(before.keys, redundancy, strict=True) if key not in taken]
            assert redundancy[before.keys.index(gone)] >= max(free) - TOLERANCE

    @invariant()
    def same_maps(self):
        if not hasattr(self, "index"):
            return
        assert len(self.index) == len(self.model) <= self.capacity
        assert set(self.index.keys) == set(self.model)
        for row, key in enumerate(self.index.keys):
            assert self.index.row_of(key) == row
            np.testing.assert_array_equal(self.index.probabilities(row), self.model[key].maps[0])


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

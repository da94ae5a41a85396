"""The resident index against a float64 reference that takes one pair at a time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UsageError
from store.errors import InvalidMapError
from store.index import ResidentIndex
from store.rows import MapRows, round_records
from tests.store.samples import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    cosines,
    make_record,
    make_records,
    prefix_cosines,
    redundancies,
)

TOLERANCE = 2e-6


def round_all(records, keys=None) -> MapRows:
    probabilities = records[0].probabilities
    names = keys or [f"{record.sequence}/{record.iteration}" for record in records]
    return round_records(records, names, *probabilities.shape, len(records[0].embedding))


def filled_index(count: int, capacity: int = 1000, distance: int = 3) -> tuple[ResidentIndex, MapRows]:
    index = ResidentIndex(LAYERS, EXPERTS, HIDDEN, capacity, distance)
    rows = round_all(make_records(count))
    index.insert(rows)
    return index, rows


def whole_scan(index: ResidentIndex, probabilities: np.ndarray) -> np.ndarray:
    """Cosines after all layers of maps [B, L, J]."""
    scan = index.start_trajectory(len(probabilities))
    for layer in range(index.layers):
        scores = scan.observe(probabilities[:, layer])
    return scores


def search(index: ResidentIndex, record) -> tuple[np.ndarray, np.ndarray]:
    return index.semantic_scores(record.embedding[None]), whole_scan(index, record.probabilities[None])


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 7),
    experts=st.integers(1, 9),
    hidden=st.integers(1, 33),
    stored=st.integers(0, 12),
    batch=st.integers(1, 4),
    zeros=st.sets(st.integers(0, 6)),
    seed=st.integers(0, 2**31),
)
def test_scores_equal_the_reference_at_every_layer(layers, experts, hidden, stored, batch, zeros, seed):
    shape = {"layers": layers, "experts": experts, "hidden": hidden, "seed": seed}
    index = ResidentIndex(layers, experts, hidden)
    kept = [make_record(i, **shape) for i in range(stored)]
    if kept:
        rows = round_all(kept)
        index.insert(rows)
    else:
        rows = MapRows((), np.empty((0, hidden), np.float16), np.empty((0, layers, experts), np.float16))
    queries = [make_record(100 + i, **shape) for i in range(batch)]
    maps = np.stack([query.probabilities for query in queries])
    maps[:, [layer for layer in zeros if layer < layers]] = 0
    embeddings = np.stack([query.embedding for query in queries])
    embeddings[0] *= len(zeros) % 2

    np.testing.assert_allclose(index.semantic_scores(embeddings), cosines(embeddings, rows.embeddings), atol=TOLERANCE)
    scan = index.start_trajectory(batch)
    for layer in range(layers):
        scores = scan.observe(maps[:, layer])
        assert scores.shape == (batch, stored)
        np.testing.assert_allclose(scores, prefix_cosines(maps, rows.maps, layer + 1), atol=TOLERANCE)
    for row in range(stored):
        np.testing.assert_array_equal(index.probabilities(row), rows.maps[row].astype(np.float32))


def test_a_map_finds_itself_with_cosine_one():
    index, rows = filled_index(50)
    scores = whole_scan(index, rows.maps.astype(np.float32))
    assert (scores.argmax(axis=1) == np.arange(50)).all()
    np.testing.assert_allclose(scores.max(axis=1), 1, atol=TOLERANCE)


def test_a_stored_map_may_begin_with_an_empty_layer():
    record = make_record(0)
    record.probabilities[0] = 0
    index = ResidentIndex(LAYERS, EXPERTS, HIDDEN)
    index.publish([record])
    scan = index.start_trajectory(1)
    assert scan.observe(make_record(1).probabilities[:1]).tolist() == [[0.0]]
    assert np.isfinite(scan.observe(make_record(1).probabilities[1:2])).all()


def test_more_layers_than_the_maps_have_are_refused():
    index, rows = filled_index(3)
    scan = index.start_trajectory(1)
    for layer in range(LAYERS):
        scan.observe(rows.maps[:1, layer])
    with pytest.raises(ValueError, match="6 layers"):
        scan.observe(rows.maps[:1, 0])


@pytest.mark.parametrize("distance", [1, 3, LAYERS - 1, LAYERS, LAYERS + 5])
def test_a_full_index_replaces_the_most_redundant_map(distance):
    index, stored = filled_index(20, capacity=20, distance=distance)
    newcomer = round_all(make_records(1, first=500))
    expected = int(redundancies(newcomer, stored, distance)[0].argmax())
    assert index.insert(newcomer) == [stored.keys[expected]]
    assert index.row_of("500/0") == expected
    assert index.row_of(stored.keys[expected]) is None
    assert len(index) == 20
    np.testing.assert_array_equal(index.probabilities(expected), newcomer.maps[0].astype(np.float32))


def test_given_scores_are_used_instead_of_a_second_search():
    index, stored = filled_index(20, capacity=20)
    newcomer = make_record(500)
    search(index, newcomer)
    claimed = np.zeros((1, 20), np.float32)
    claimed[0, 7] = 1
    assert index.insert(round_all([newcomer]), claimed, claimed) == [stored.keys[7]]


def test_newcomers_of_one_call_take_different_places():
    index, stored = filled_index(20, capacity=20)
    twins = [replace(make_record(500), sequence=500 + i) for i in range(20)]
    assert sorted(index.insert(round_all(twins))) == sorted(stored.keys)
    assert set(index.keys) == {f"{500 + i}/0" for i in range(20)}


def test_newcomers_do_not_replace_siblings_that_filled_the_last_places():
    index, stored = filled_index(18, capacity=20)
    twins = [replace(make_record(500), sequence=500 + i) for i in range(4)]
    replaced = index.insert(round_all(twins))
    assert replaced[:2] == [None, None]
    assert len(set(replaced[2:]) & set(stored.keys)) == 2


def test_more_newcomers_than_places_leave_the_latest():
    index = ResidentIndex(LAYERS, EXPERTS, HIDDEN, capacity=4)
    replaced = index.insert(round_all(make_records(11)))
    assert len(index) == 4
    assert len([key for key in replaced if key is not None]) == 7
    assert set(index.keys) | {key for key in replaced if key} == {f"{i}/0" for i in range(11)}


def test_scores_of_rows_replaced_since_the_iteration_began_are_taken_anew():
    between = round_all([make_record(900)])
    checked = 0
    for seed in range(500, 600):
        index, stored = filled_index(20, capacity=20)
        late = make_record(seed)
        newcomer = round_all([late], ["late"])
        scores = search(index, late)
        (gone,) = index.insert(between)
        row = stored.keys.index(gone)
        before = redundancies(newcomer, stored, 3)[0]
        after = before.copy()
        after[row] = redundancies(newcomer, between, 3)[0, 0]
        if before.argmax() == row != after.argmax():
            assert index.insert(newcomer, *scores) == [stored.keys[after.argmax()]]
            checked += 1
    assert checked > 2


def test_scores_of_rows_added_since_the_iteration_began_are_taken_anew():
    index, _ = filled_index(19, capacity=20)
    late = make_record(500)
    semantic, trajectory = search(index, late)
    assert semantic.shape == (1, 19)
    index.insert(round_all([make_record(500)], ["twin"]))
    for _ in range(50):
        index.semantic_scores(late.embedding[None])
    assert index.insert(round_all([late], ["late"]), semantic, trajectory) == ["twin"]


def test_a_scan_follows_rows_that_change_under_it():
    index, _ = filled_index(20, capacity=20)
    query = make_record(500).probabilities
    scan = index.start_trajectory(1)
    for layer in range(3):
        scan.observe(query[None, layer])
    newcomer = round_all(make_records(1, first=900))
    (gone,) = index.insert(newcomer)
    scores = scan.observe(query[None, 3])
    stored = np.stack([index.probabilities(row) for row in range(20)])
    assert gone is not None
    np.testing.assert_allclose(scores, prefix_cosines(query[None], stored, 4), atol=TOLERANCE)


def test_a_known_key_is_written_over_in_its_row():
    index, stored = filled_index(20, capacity=20)
    changed = round_all([replace(make_record(700), sequence=5)])
    assert changed.keys[0] == stored.keys[5]
    assert index.insert(changed) == [None]
    np.testing.assert_array_equal(index.probabilities(5), changed.maps[0].astype(np.float32))
    assert len(index) == 20


def test_overfilling_with_copies_leaves_the_distinct_maps():
    distinct = make_records(30)
    copies = [replace(make_record(3), sequence=1000 + i) for i in range(300)]
    index = ResidentIndex(LAYERS, EXPERTS, HIDDEN, capacity=100)
    displaced = index.fill(round_all(distinct + copies))
    assert len(displaced) == 230
    assert set(index.keys).isdisjoint(displaced)
    assert {f"{i}/0" for i in range(30) if i != 3} <= set(index.keys)


def test_nearest_other_leaves_the_map_itself_out():
    index, rows = filled_index(15)
    semantic, trajectory = index.nearest_other(np.array([2, 9]))
    expected = cosines(rows.embeddings[[2, 9]], rows.embeddings)
    expected_map = prefix_cosines(rows.maps[[2, 9]], rows.maps, LAYERS)
    for scores in (expected, expected_map):
        scores[[0, 1], [2, 9]] = -1
    np.testing.assert_allclose(semantic, expected.max(axis=1), atol=TOLERANCE)
    np.testing.assert_allclose(trajectory, expected_map.max(axis=1), atol=TOLERANCE)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1e6])
def test_maps_without_a_cosine_are_refused_and_nothing_is_taken(value):
    index, _ = filled_index(3)
    broken = make_record(9)
    broken.probabilities[:] = value
    with pytest.raises(InvalidMapError, match="sequence 9, iteration 0"):
        index.publish([make_record(8), broken])
    assert len(index) == 3


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_embeddings_without_a_cosine_are_refused(value):
    broken = make_record(9)
    broken.embedding[:] = value
    with pytest.raises(InvalidMapError, match="embedding is zero or not finite"):
        filled_index(1)[0].publish([broken])


def test_records_of_another_shape_are_refused():
    with pytest.raises(InvalidMapError, match="do not fit"):
        filled_index(1)[0].publish([make_record(9, hidden=HIDDEN + 1)])


@pytest.mark.parametrize(("capacity", "distance"), [(0, 3), (10, 0)])
def test_an_index_without_places_or_distance_is_refused(capacity, distance):
    with pytest.raises(UsageError, match="at least 1"):
        ResidentIndex(LAYERS, EXPERTS, HIDDEN, capacity, distance)


def test_huge_embeddings_keep_their_direction():
    record = make_record(9)
    record.embedding[:] *= 1e30
    index = ResidentIndex(LAYERS, EXPERTS, HIDDEN)
    index.publish([record])
    np.testing.assert_allclose(index.semantic_scores(make_record(9).embedding[None]), 1, atol=1e-3)


def test_published_records_get_places_of_their_own():
    index = ResidentIndex(LAYERS, EXPERTS, HIDDEN)
    index.publish(make_records(2))
    index.publish(make_records(2))
    assert len(index) == 4


def test_memory_follows_the_maps_held_not_the_capacity():
    index, _ = filled_index(10, capacity=1_000_000)
    a_map = 4 * (LAYERS * EXPERTS + LAYERS + HIDDEN) + 8
    assert index.nbytes <= 256 * a_map
    index.insert(round_all(make_records(600, first=10)))
    assert 610 * a_map <= index.nbytes <= 1220 * a_map


def test_stored_maps_cannot_be_written_through_a_view():
    index, _ = filled_index(1)
    with pytest.raises(ValueError, match="read-only"):
        index.probabilities(0)[0, 0] = 1


def test_the_index_needs_no_database_and_no_torch():
    code = "import sys, store.index\nprint(sorted({'lancedb', 'pyarrow', 'sqlalchemy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

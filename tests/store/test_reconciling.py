"""Memory, log and catalog agree again: after a change of capacity, other writers, a move or a loss."""

from __future__ import annotations

import shutil

from store.listing import list_stores
from tests.store.samples import contents, make_fingerprint, make_records, open_store, warm


def test_a_full_store_reopens_with_the_same_maps_and_no_others_on_disk(tmp_path):
    with open_store(tmp_path, capacity=30) as store:
        store.begin_run("warm", "prompts")
        kept = replaced = 0
        for start in range(0, 120, 8):
            store.publish(make_records(8, start))
            if start % 24 == 0:
                report = store.flush()
                kept, replaced = kept + report.kept, replaced + report.replaced
        report = store.flush(120)
        assert replaced + report.replaced == 90
        # Newcomers that were replaced before a flush came by were never written.
        assert kept + report.kept < 120
        before = contents(store)
    with open_store(tmp_path) as store:
        assert store.capacity == 30
        assert contents(store) == before
    (listing,) = list_stores(tmp_path)
    assert listing.files.rows == 30


def test_a_smaller_capacity_is_recorded_and_trims_at_the_next_flush(tmp_path):
    warm(tmp_path, 40)
    with open_store(tmp_path, capacity=25) as store:
        assert len(store) == 25
        before = contents(store)
    assert list_stores(tmp_path)[0].files.rows == 40
    with open_store(tmp_path) as store:
        assert store.capacity == 25
        assert contents(store) == before
        assert store.flush().replaced == 15
    assert list_stores(tmp_path)[0].files.rows == 25


def test_a_larger_capacity_makes_room(tmp_path):
    warm(tmp_path, 30, capacity=20)
    warm(tmp_path, 30, first=100, capacity=60)
    with open_store(tmp_path) as store:
        assert (store.capacity, len(store)) == (60, 50)


def test_what_others_append_beyond_the_capacity_is_trimmed_on_opening(tmp_path):
    with open_store(tmp_path, capacity=20) as one, open_store(tmp_path) as two:
        for number, store in enumerate((one, two)):
            store.begin_run("chat")
            store.publish(make_records(15, first=100 * number))
            store.flush()
        assert (len(one), len(two)) == (15, 15)
    assert list_stores(tmp_path)[0].files.rows == 30
    with open_store(tmp_path) as store:
        assert len(store) == 20
        store.begin_run("chat")
        store.publish(make_records(1, first=500))
        assert store.flush().replaced == 11
        before = contents(store)
    with open_store(tmp_path) as store:
        assert contents(store) == before


def test_a_copied_store_opens_where_no_catalog_knows_it(tmp_path):
    before = warm(tmp_path / "here", 12, capacity=50, distance=2)
    digest = make_fingerprint().digest
    shutil.copytree(tmp_path / "here" / "stores" / digest, tmp_path / "there" / "carried")
    with open_store(tmp_path / "elsewhere", location=str(tmp_path / "there" / "carried")) as store:
        assert contents(store) == before
        assert (store.capacity, store.description.distance) == (50, 2)
        (run,) = store.statistics().runs
        assert (run.kind, run.maps) == ("adopted", 12)
    with open_store(tmp_path / "elsewhere", location=str(tmp_path / "there" / "carried")) as store:
        assert [run.maps for run in store.statistics().runs] == [12]


def test_a_store_deleted_and_made_anew_begins_anew(tmp_path):
    with open_store(tmp_path) as store:
        store.begin_run("warm", "prompts", resume=True)
        store.publish(make_records(3))
        store.flush(3)
    shutil.rmtree(tmp_path / "stores")
    with open_store(tmp_path) as store:
        assert store.statistics().runs == ()
        assert store.begin_run("warm", "prompts", resume=True).completed == 0


def test_a_store_whose_catalog_is_gone_still_has_its_maps(tmp_path):
    before = warm(tmp_path, 12)
    for path in tmp_path.glob("catalog.db*"):
        path.unlink()
    with open_store(tmp_path) as store:
        assert contents(store) == before

"""The catalog on real SQLite files."""

from __future__ import annotations

import pytest

from engine.errors import UsageError
from store.catalog import Catalog, LoggedBatch
from store.errors import StoreError
from store.schema import StoreDescription
from tests.store.samples import make_fingerprint

MODEL = make_fingerprint()
DESCRIPTION = StoreDescription("ab" * 16, MODEL, "tiny", 3, 100)


@pytest.fixture
def catalog(tmp_path):
    opened = Catalog.open(tmp_path)
    yield opened
    opened.close()


def begin(catalog: Catalog, run_id: str = "r1"):
    entry = catalog.register(DESCRIPTION, "/a/store", MODEL, None)
    return entry.pk, catalog.begin_run(entry.pk, run_id, "warm", MODEL.digest, "prompts", {"seed": 1})


def test_a_store_keeps_its_capacity_until_another_is_asked_for(catalog):
    assert catalog.register(DESCRIPTION, "/a/store", MODEL, None).capacity == 100
    assert catalog.register(DESCRIPTION, "/a/store", MODEL, 50).capacity == 50
    assert catalog.register(DESCRIPTION, "/a/store", MODEL, None).capacity == 50
    assert catalog.register(DESCRIPTION, "/a/copy", MODEL, None).capacity == 100
    assert catalog.locations() == ["/a/copy", "/a/store"]


def test_a_batch_and_its_progress_are_entered_together(catalog):
    pk, run = begin(catalog)
    run = catalog.commit(pk, run, "b1", rows=10, replaced=2, completed=5)
    assert (run.maps, run.replaced, run.completed) == (10, 2, 5)
    run = catalog.commit(pk, run, None, rows=0, replaced=1, completed=None)
    assert (run.maps, run.replaced, run.completed) == (10, 3, 5)
    assert catalog.runs(pk) == (run,)
    assert run.started.tzinfo is not None


def test_unknown_batches_are_adopted_once(catalog):
    pk, run = begin(catalog)
    catalog.commit(pk, run, "b1", 10, 0, 5)
    found = {"b1": LoggedBatch("r1", 8), "b2": LoggedBatch("r1", 4), "b3": LoggedBatch("r9", 6)}
    assert catalog.adopt(pk, MODEL.digest, found) == ["b2", "b3"]
    assert catalog.adopt(pk, MODEL.digest, found) == []
    assert [(run.id, run.kind, run.maps) for run in catalog.runs(pk)] == [
        ("r1", "warm", 14),
        ("r9", "adopted", 6),
    ]


def test_a_batch_adopted_while_its_writer_lives_counts_once(catalog):
    pk, run = begin(catalog)
    catalog.adopt(pk, MODEL.digest, {"b1": LoggedBatch("r1", 10)})
    assert catalog.commit(pk, run, "b1", 10, 0, 5).maps == 10


def test_an_adopted_run_that_resumes_gets_its_kind_and_data_set(catalog):
    entry = catalog.register(DESCRIPTION, "/a/store", MODEL, None)
    catalog.adopt(entry.pk, MODEL.digest, {"b1": LoggedBatch("r1", 10)})
    _, run = begin(catalog)
    assert (run.kind, run.dataset, run.maps, run.status) == ("warm", "prompts", 10, "running")


def test_copies_of_a_store_have_runs_of_their_own(catalog):
    pk, run = begin(catalog)
    catalog.commit(pk, run, "b1", 10, 0, 5)
    copy = catalog.register(DESCRIPTION, "/a/copy", MODEL, None)
    catalog.adopt(copy.pk, MODEL.digest, {"b1": LoggedBatch("r1", 10)})
    assert [run.completed for run in catalog.runs(copy.pk)] == [0]
    assert [run.completed for run in catalog.runs(pk)] == [5]


def test_two_handles_see_each_other(tmp_path, catalog):
    pk, run = begin(catalog)
    other = Catalog.open(tmp_path)
    other.commit(pk, run, "b1", 10, 0, 7)
    other.close()
    assert catalog.runs(pk)[0].completed == 7


def test_any_sqlalchemy_url_will_do(tmp_path):
    catalog = Catalog.open(tmp_path / "home", f"sqlite:///{tmp_path}/team.db")
    begin(catalog)
    catalog.close()
    assert (tmp_path / "team.db").is_file()
    assert not (tmp_path / "home" / "catalog.db").exists()


@pytest.mark.parametrize("url", ["nonsense", "nosuchdatabase://host/name"])
def test_an_unusable_url_is_named(tmp_path, url):
    with pytest.raises(UsageError, match=url):
        Catalog.open(tmp_path, url)


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "catalog.db").write_bytes(b"dear diary, " * 1000)
    with pytest.raises(StoreError, match=r"catalog\.db: the catalog cannot be"):
        Catalog.open(tmp_path)


def test_a_folder_in_the_place_of_the_catalog_or_a_file_in_that_of_the_locks_is_named(tmp_path):
    (tmp_path / "a" / "catalog.db").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"catalog\.db: the catalog cannot be opened"):
        Catalog.open(tmp_path / "a")
    (tmp_path / "locks").write_text("")
    with pytest.raises(StoreError, match=r"locks.*cannot be locked \(File exists\)"):
        Catalog.open(tmp_path)

"""The store as its users see it: maps persist, runs resume, capacity holds, strangers are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from engine.errors import UsageError
from store.errors import InvalidMapError, StoreError, StoreMismatchError, StoreNotFoundError
from store.expert_map_store import ExpertMapStore
from store.listing import find_store, list_stores
from tests.store.samples import HIDDEN, LAYERS, make_fingerprint, make_record, make_records


def open_store(home: Path, **options) -> ExpertMapStore:
    return ExpertMapStore.open(home, options.pop("fingerprint", make_fingerprint()), **options)


def contents(store: ExpertMapStore) -> dict[str, tuple[bytes, bytes]]:
    """Map and search vector of every key, to the bit."""
    index = store.index
    return {
        key: (index.probabilities(row).tobytes(), index.semantic_scores(np.eye(HIDDEN))[:, row].tobytes())
        for row, key in enumerate(index.keys)
    }


def warm(home: Path, count: int, first: int = 0, **options) -> dict[str, tuple[bytes, bytes]]:
    with open_store(home, **options) as store:
        store.begin_run("warm", "prompts")
        store.publish(make_records(count, first))
        store.flush(count)
        return contents(store)


def test_reopening_gives_the_same_index(tmp_path):
    before = warm(tmp_path, 40)
    with open_store(tmp_path, create=False) as store:
        assert len(store) == 40
        assert contents(store) == before
        again = make_record(17)
        assert store.semantic_scores(again.embedding[None]).argmax() == 17
        scan = store.start_trajectory(1)
        for layer in range(LAYERS):
            scores = scan.observe(again.probabilities[None, layer])
        assert scores.argmax() == 17
        np.testing.assert_allclose(store.probabilities(17), again.probabilities, atol=1e-3)


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


def test_publishing_writes_nothing_before_a_flush(tmp_path):
    with open_store(tmp_path) as store:
        store.begin_run("chat")
        store.publish(make_records(5))
        assert store.pending == 5
        with open_store(tmp_path) as other:
            assert len(other) == 0
        assert store.flush().kept == 5
        assert store.pending == 0
        assert store.flush() == replace(store.flush(), kept=0, replaced=0)
        with open_store(tmp_path) as other:
            assert len(other) == 5


def test_maps_published_while_a_flush_writes_are_all_accounted_for(tmp_path):
    with open_store(tmp_path, capacity=20) as store:
        store.begin_run("chat")

        def publish_all():
            for i in range(300):
                store.publish(make_records(1, first=i))

        matcher = Thread(target=publish_all)
        matcher.start()
        while matcher.is_alive():
            store.flush()
        matcher.join()
        store.flush()
        before = contents(store)
    with open_store(tmp_path) as store:
        assert contents(store) == before
    assert list_stores(tmp_path)[0].files.rows == 20


def test_closing_keeps_what_was_pending(tmp_path):
    with open_store(tmp_path) as store:
        store.begin_run("chat")
        store.publish(make_records(5))
    with open_store(tmp_path) as store:
        assert len(store) == 5
        (run,) = store.statistics().runs
        assert (run.kind, run.status, run.maps) == ("chat", "interrupted", 5)


def test_a_run_resumes_and_its_repeated_iterations_take_no_new_places(tmp_path):
    settings = {"seed": 1, "max_new_tokens": 4}
    with open_store(tmp_path) as store:
        run = store.begin_run("warm", "prompts", settings, resume=True)
        assert run.completed == 0
        store.publish(make_records(6))
        store.flush(completed=6)
        store.publish(make_records(2, first=6))
        store.flush()
    with open_store(tmp_path) as store:
        again = store.begin_run("warm", "prompts", dict(reversed(settings.items())), resume=True)
        assert (again.id, again.completed, again.maps) == (run.id, 6, 8)
        store.publish(make_records(4, first=6))
        assert len(store) == 10
        assert store.flush(10).replaced == 0
        assert store.finish_run().status == "finished"
    (listing,) = list_stores(tmp_path)
    assert listing.files.rows == 10
    with open_store(tmp_path) as store:
        assert store.begin_run("warm", "prompts", settings, resume=True).completed == 10


@pytest.mark.parametrize(
    ("dataset", "settings", "location"),
    [("other", {"seed": 1}, None), ("prompts", {"seed": 2}, None), ("prompts", {"seed": 1}, "second")],
)
def test_another_data_set_setting_or_store_is_another_run(tmp_path, dataset, settings, location):
    with open_store(tmp_path) as store:
        first = store.begin_run("warm", "prompts", {"seed": 1}, resume=True)
        store.flush(completed=9)
    with open_store(tmp_path, location=location) as store:
        run = store.begin_run("warm", dataset, settings, resume=True)
        assert run.id != first.id
        assert run.completed == 0


def test_runs_that_do_not_resume_are_new_each_time(tmp_path):
    with open_store(tmp_path) as store:
        first = store.begin_run("chat")
        store.publish(make_records(3))
        store.finish_run()
        second = store.begin_run("chat")
        store.publish(make_records(3))
        assert first.id != second.id
        assert len(store) == 6


def test_a_map_published_twice_before_a_flush_is_written_once(tmp_path):
    with open_store(tmp_path) as store:
        store.begin_run("chat")
        store.publish(make_records(3))
        store.publish([replace(make_record(50), sequence=1)])
        assert store.flush().kept == 3
        assert len(store) == 3
        before = contents(store)
    with open_store(tmp_path) as store:
        assert contents(store) == before


def test_maps_need_a_run(tmp_path):
    with open_store(tmp_path) as store:
        with pytest.raises(StoreError, match="begin_run"):
            store.publish(make_records(1))
        with pytest.raises(StoreError, match="no run"):
            store.finish_run()
        store.begin_run("chat")
        with pytest.raises(StoreError, match="finished before another"):
            store.begin_run("chat")


def test_a_refused_record_leaves_the_store_as_it_was(tmp_path):
    with open_store(tmp_path) as store:
        store.begin_run("chat")
        broken = make_record(1)
        broken.embedding[:] = np.nan
        with pytest.raises(InvalidMapError):
            store.publish([make_record(0), broken])
        assert (len(store), store.pending) == (0, 0)


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


def test_another_models_store_is_refused_with_both_named(tmp_path):
    warm(tmp_path, 3, location=str(tmp_path / "shared"))
    other = make_fingerprint(weights_hash="w1")
    with pytest.raises(StoreMismatchError) as error:
        open_store(tmp_path, fingerprint=other, location=str(tmp_path / "shared"))
    assert make_fingerprint().describe() in str(error.value)
    assert other.describe() in str(error.value)
    assert "give --store another place" in str(error.value)
    with open_store(tmp_path, fingerprint=other, location=str(tmp_path / "shared"), allow_mismatch=True) as store:
        store.begin_run("chat")
        store.publish(make_records(2, first=50))
        assert len(store) == 5


@pytest.mark.parametrize("change", [{"layers": LAYERS + 1}, {"experts": 4}, {"hidden_size": HIDDEN * 2}])
def test_other_shapes_are_refused_whatever_is_allowed(tmp_path, change):
    warm(tmp_path, 3, location=str(tmp_path / "shared"))
    with pytest.raises(StoreMismatchError, match="the store belongs to"):
        open_store(
            tmp_path,
            fingerprint=make_fingerprint(**change),
            location=str(tmp_path / "shared"),
            allow_mismatch=True,
        )


def test_models_do_not_share_their_own_stores(tmp_path):
    warm(tmp_path, 3)
    with open_store(tmp_path, fingerprint=make_fingerprint(weights_hash="w1")) as store:
        assert len(store) == 0
    assert len(list_stores(tmp_path)) == 2


def test_names_paths_and_the_default_are_different_stores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    digest = make_fingerprint().digest
    for location, folder in [
        (None, home / "stores" / digest),
        ("code", home / "stores" / f"{digest}-code"),
        ("./code", tmp_path / "code"),
    ]:
        with open_store(home, location=location) as store:
            assert len(store) == 0
        warm(home, 2, location=location)
        assert (folder / "maps.lance").is_dir()


@pytest.mark.parametrize("location", [None, "code", "./code"])
def test_opening_what_is_not_there_creates_nothing(tmp_path, monkeypatch, location):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreNotFoundError):
        open_store(tmp_path / "home", location=location, create=False)
    assert list(tmp_path.iterdir()) == []
    assert list_stores(tmp_path / "home") == ()
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": -5}, {"distance": 0}])
def test_nonsense_is_refused_before_anything_is_created(tmp_path, options):
    with pytest.raises(UsageError, match="at least 1"):
        open_store(tmp_path / "home", **options)
    assert not (tmp_path / "home").exists()


def test_a_capacity_no_catalog_can_hold_is_refused(tmp_path):
    with pytest.raises(UsageError, match="at most 2,147,483,647"):
        open_store(tmp_path / "home", capacity=2**31)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("location", [None, "x" * 300])
def test_a_place_the_system_refuses_is_named(tmp_path, location):
    (tmp_path / "file").write_text("")
    home = tmp_path / ("file" if location is None else "home")
    with pytest.raises(StoreError, match=r"(file|x)/?.*: (Not a directory|File name too long); finemoe needs folders"):
        open_store(home, location=location)
    with pytest.raises(StoreNotFoundError, match="no such user"):
        open_store(home, location="~no-such-user/store")


def test_a_distance_beyond_the_layers_is_the_layers(tmp_path):
    with open_store(tmp_path, fingerprint=make_fingerprint(layers=2)) as store:
        assert store.description.distance == 2


def test_statistics_count_what_inspect_shows(tmp_path):
    with open_store(tmp_path, model_name="tiny", capacity=90) as store:
        store.begin_run("warm", "prompts", {"seed": 0}, resume=True)
        store.publish(make_records(10))
        store.publish(make_records(20, iteration=1))
        store.finish_run()
        chat = store.begin_run("chat")
        store.publish(make_records(3, first=50, iteration=2))
        statistics = store.statistics()
    assert (statistics.maps, statistics.pending, statistics.capacity) == (33, 3, 90)
    assert statistics.maps_by_phase == {"prefill": 10, "decode": 23}
    assert statistics.maps_by_dataset == {"prompts": 30, "": 3}
    assert statistics.maps_by_run[chat.id] == 3
    assert [(run.kind, run.status, run.maps) for run in statistics.runs] == [
        ("warm", "finished", 30),
        ("chat", "running", 0),
    ]
    on_disk = sum(path.stat().st_size for path in Path(statistics.location).rglob("*") if path.is_file())
    assert 0 < statistics.bytes_on_disk <= on_disk + 65536
    fields = json.loads(json.dumps(statistics.to_dict()))
    assert fields["fingerprint"] == make_fingerprint().digest
    assert (fields["layers"], fields["experts"], fields["top_k"]) == (LAYERS, 8, 2)
    assert fields["model"]["weights_hash"] == "w0"
    assert fields["coverage"]["sample"] == 33


def test_coverage_is_of_the_nearest_other_map(tmp_path):
    with open_store(tmp_path) as store:
        assert store.statistics().coverage is None
        store.begin_run("chat")
        store.publish(make_records(2))
        store.publish([replace(make_record(0), sequence=7), replace(make_record(1), sequence=8)])
        coverage = store.statistics().coverage
    assert coverage.sample == 4
    assert coverage.semantic.p10 == pytest.approx(1, abs=1e-5)
    assert coverage.trajectory.mean == pytest.approx(1, abs=1e-5)


def test_listing_names_every_store_and_what_is_wrong_with_one(tmp_path):
    warm(tmp_path, 4, model_name="tiny")
    warm(tmp_path, 2, location=str(tmp_path / "apart"))
    broken = tmp_path / "stores" / "broken" / "maps.lance"
    broken.mkdir(parents=True)
    (broken / "_versions").mkdir()
    (broken / "_versions" / "1.manifest").write_bytes(b"nonsense")
    (tmp_path / "stores" / "empty").mkdir()
    listings = {Path(listing.location).name: listing for listing in list_stores(tmp_path)}
    digest = make_fingerprint().digest
    assert set(listings) == {digest, "apart", "broken"}
    assert listings[digest].description.model_name == "tiny"
    assert (listings[digest].files.rows, listings["apart"].files.rows) == (4, 2)
    assert listings["broken"].description is None
    assert "broken" in listings["broken"].problem


def test_a_store_is_found_by_its_path_whatever_its_model(tmp_path):
    warm(tmp_path, 4, location=str(tmp_path / "apart"))
    found = find_store(tmp_path / "home", str(tmp_path / "apart"))
    assert (found.description.fingerprint, found.files.rows) == (make_fingerprint(), 4)
    assert find_store(tmp_path / "home", str(tmp_path / "nowhere")) is None
    assert not (tmp_path / "nowhere").exists()

"""Maps and runs going in: what is durable when, what resumes, what is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from store.errors import InvalidMapError, StoreError
from store.listing import list_stores
from tests.store.samples import LAYERS, contents, make_fingerprint, make_record, make_records, open_store


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

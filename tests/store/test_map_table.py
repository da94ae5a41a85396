"""The durable log on real LanceDB files."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from store.errors import StoreError, StoreNotFoundError
from store.locations import locate
from store.maps import VERSIONS_PER_COMPACTION, MapTable
from store.rows import round_records
from store.schema import LoggedMap, StoreDescription, map_schema
from store.write_buffer import PendingBatch
from tests.store.samples import EXPERTS, HIDDEN, LAYERS, make_fingerprint, make_records

DESCRIPTION = StoreDescription("ab" * 16, make_fingerprint(), "tiny", 3, 100)


@pytest.fixture
def place(tmp_path):
    return locate(tmp_path, "", str(tmp_path / "store"))


def logged_maps(count: int, first: int = 0, iteration: int = 0, run_id: str = "run") -> list[LoggedMap]:
    records = make_records(count, first, iteration)
    keys = [f"k'{record.sequence}" for record in records]
    rows = round_records(records, keys, LAYERS, EXPERTS, HIDDEN)
    created = datetime(2026, 1, 2, 3, 4, 5, 678, UTC)
    return [
        LoggedMap(key, "model", run_id, record, rows.embeddings[i], rows.maps[i], created)
        for i, (key, record) in enumerate(zip(keys, records, strict=True))
    ]


def batch_of(maps=(), obsolete=(), rewritten=()) -> PendingBatch:
    return PendingBatch(list(maps), list(obsolete), list(rewritten), 0)


def test_what_is_written_is_read_back_in_order(place):
    maps = logged_maps(7)
    batch_id = MapTable.create(place, DESCRIPTION).write(batch_of(maps))
    table = MapTable.open(place)
    log = table.scan()
    assert table.description == DESCRIPTION
    assert log.rows.keys == tuple(row.key for row in maps)
    np.testing.assert_array_equal(log.rows.embeddings, np.stack([row.embedding for row in maps]))
    np.testing.assert_array_equal(log.rows.maps, np.stack([row.map for row in maps]))
    assert log.batch_ids == [batch_id] * 7
    assert log.run_ids == ["run"] * 7
    assert log.phases == ["prefill"] * 7


def test_the_schema_names_the_model_and_holds_float16_vectors():
    schema = map_schema(DESCRIPTION)
    assert schema.field("map").type == pa.list_(pa.float16(), LAYERS * EXPERTS)
    assert schema.field("embedding").type == pa.list_(pa.float16(), HIDDEN)
    metadata = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    assert (metadata["finemoe.layers"], metadata["finemoe.top_k"], metadata["finemoe.distance"]) == ("6", "2", "3")
    assert StoreDescription.from_schema(schema, "here") == DESCRIPTION


def test_a_later_schema_is_refused():
    schema = map_schema(DESCRIPTION)
    later = schema.with_metadata(schema.metadata | {b"finemoe.schema_version": b"2"})
    with pytest.raises(StoreError, match=r"here: .*version 2.*upgrade finemoe"):
        StoreDescription.from_schema(later, "here")


def test_a_table_of_another_program_is_refused():
    with pytest.raises(StoreError, match="does not describe a finemoe store"):
        StoreDescription.from_schema(pa.schema([("key", pa.string())]), "here")


def test_an_empty_log_is_read_as_no_maps(place):
    log = MapTable.create(place, DESCRIPTION).scan()
    assert len(log.rows) == 0
    assert log.rows.maps.shape == (0, LAYERS, EXPERTS)


def test_of_equal_keys_the_last_written_counts(place):
    table = MapTable.create(place, DESCRIPTION)
    table.write(batch_of(logged_maps(4)))
    again = logged_maps(1, first=2, iteration=5)
    latest = table.write(batch_of(again))
    log = table.scan()
    assert len(log.rows) == 4
    row = log.rows.keys.index("k'2")
    assert log.batch_ids[row] == latest
    np.testing.assert_array_equal(log.rows.maps[row], again[0].map)


def test_replaced_and_rewritten_maps_leave_the_log(place):
    table = MapTable.create(place, DESCRIPTION)
    table.write(batch_of(logged_maps(4)))
    table.write(batch_of(logged_maps(1, first=2), obsolete=["k'0", "k'3"], rewritten=["k'2"]))
    assert table.files().rows == 2
    assert table.scan().rows.keys == ("k'1", "k'2")


def test_two_handles_append_and_see_each_other(place):
    first, second = MapTable.create(place, DESCRIPTION), MapTable.open(place)
    first.write(batch_of(logged_maps(3)))
    second.write(batch_of(logged_maps(3, first=10)))
    assert len(first.scan().rows) == len(second.scan().rows) == 6


def test_creating_again_opens_what_is_there(place):
    MapTable.create(place, DESCRIPTION).write(batch_of(logged_maps(3)))
    other = StoreDescription("cd" * 16, make_fingerprint(), "other", 1, 5)
    again = MapTable.create(place, other)
    assert again.description == DESCRIPTION
    assert len(again.scan().rows) == 3


def test_a_mistyped_path_is_not_created(tmp_path, place):
    with pytest.raises(StoreNotFoundError, match="no expert-map store"):
        MapTable.open(place)
    with pytest.raises(StoreNotFoundError, match=r"mistyped: no such folder"):
        MapTable.create(locate(tmp_path, "", str(tmp_path / "mistyped" / "store")), DESCRIPTION)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(tmp_path, place):
    place.folder.mkdir()
    (place.folder / "letters.txt").write_text("dear")
    with pytest.raises(StoreError, match="is no expert-map store"):
        MapTable.create(place, DESCRIPTION)
    assert [path.name for path in place.folder.iterdir()] == ["letters.txt"]


def test_a_file_is_no_place_for_a_store(tmp_path, place):
    place.folder.write_text("dear")
    with pytest.raises(StoreError, match="is no expert-map store"):
        MapTable.create(place, DESCRIPTION)


def test_damaged_files_are_named(place):
    table = MapTable.create(place, DESCRIPTION)
    table.write(batch_of(logged_maps(3)))
    for path in place.folder.rglob("*.lance"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(StoreError, match=r"store: reading maps failed"):
        MapTable.open(place).scan()


def test_a_uri_is_passed_on_as_it_is(tmp_path):
    uri = f"file://{tmp_path}/by-uri"
    place = locate(tmp_path, "digest", uri)
    assert (place.uri, place.folder, place.bytes_on_disk) == (uri, None, None)
    with pytest.raises(StoreNotFoundError, match="by-uri"):
        MapTable.open(place)
    MapTable.create(place, DESCRIPTION).write(batch_of(logged_maps(2)))
    assert len(MapTable.open(place).scan().rows) == 2


def test_compaction_comes_once_in_fifty_versions_and_keeps_recent_ones(place):
    table = MapTable.create(place, DESCRIPTION)
    compacted = 0
    for i in range(VERSIONS_PER_COMPACTION):
        table.write(batch_of(logged_maps(1, first=i)))
        compacted += table.compact_if_due()
    files = table.files()
    assert compacted == 1
    assert files.fragments < 5
    assert files.versions > VERSIONS_PER_COMPACTION
    assert table.scan().rows.keys == tuple(f"k'{i}" for i in range(VERSIONS_PER_COMPACTION))


def test_processes_that_write_little_compact_too(place):
    MapTable.create(place, DESCRIPTION)
    compacted = 0
    for i in range(VERSIONS_PER_COMPACTION):
        table = MapTable.open(place)
        table.write(batch_of(logged_maps(1, first=i)))
        compacted += table.compact_if_due()
    assert compacted == 1


_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from store.errors import StoreFullError
from store.expert_map_store import ExpertMapStore
from tests.store.samples import make_fingerprint, make_records

store = ExpertMapStore.open(Path(sys.argv[1]), make_fingerprint())
store.begin_run("warm")
store.publish(make_records(20))
store.flush(1)
store.publish(make_records(180, first=20))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, unlimited[1]))
try:
    store.flush(2)
except StoreFullError as error:
    print(error)
print(store.pending)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
print(store.flush(2).kept)
store.close()
print(len(ExpertMapStore.open(Path(sys.argv[1]), make_fingerprint(), create=False)))
"""


def test_a_full_disk_is_named_and_loses_nothing(tmp_path):
    """A limit on file sizes makes the kernel refuse the write, as a full disk or a quota does."""
    done = subprocess.run([sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    message, pending, kept, reopened = done.stdout.splitlines()
    assert "no space left while writing maps" in message
    assert (pending, kept, reopened) == ("180", "180", "200")

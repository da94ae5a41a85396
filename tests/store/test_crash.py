"""A process that is killed loses no map that a flush has reported as kept, and what it half did is made good."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from store.expert_map_store import ExpertMapStore
from store.listing import list_stores
from tests.store.samples import make_fingerprint, make_records

_KILLED_IN_FLUSH = """
import os, signal, sys
from pathlib import Path
import store.catalog, store.maps
from store.expert_map_store import ExpertMapStore
from tests.store.samples import make_fingerprint, make_records

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

home, room, method = sys.argv[1:]
opened = ExpertMapStore.open(Path(home), make_fingerprint(), capacity=30)
opened.begin_run("warm", "prompts", resume=True)
opened.publish(make_records(25))
opened.flush(25)
print("kept 25", flush=True)
opened.publish(make_records(10, first=25))
setattr(store.catalog.Catalog if room == "catalog" else store.maps.MapTable, method, die)
opened.flush(35)
"""

_KILLED_ANYWHERE = """
import sys
from pathlib import Path
from store.expert_map_store import ExpertMapStore
from tests.store.samples import make_fingerprint, make_records

opened = ExpertMapStore.open(Path(sys.argv[1]), make_fingerprint(), capacity=100_000)
run = opened.begin_run("warm", "prompts", resume=True)
done = run.completed
while True:
    opened.publish(make_records(7, first=done))
    done += 7
    opened.flush(done)
    print(done, flush=True)
"""


def die_in_flush(home: Path, room: str, method: str) -> None:
    command = [sys.executable, "-c", _KILLED_IN_FLUSH, str(home), room, method]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "kept 25\n"


def test_maps_written_before_the_catalog_knew_are_adopted(tmp_path):
    die_in_flush(tmp_path, "catalog", "commit")
    with ExpertMapStore.open(tmp_path, make_fingerprint(), create=False) as store:
        assert len(store) == 30
        (run,) = store.statistics().runs
        assert (run.status, run.completed, run.maps) == ("running", 25, 35)
        resumed = store.begin_run("warm", "prompts", resume=True)
        assert (resumed.id, resumed.completed) == (run.id, 25)
        before = set(store.index.keys)
        store.publish(make_records(10, first=25))
        assert len(before & set(store.index.keys)) >= 25
        store.flush(35)
        assert store.finish_run().completed == 35
    assert list_stores(tmp_path)[0].files.rows == 30


def test_maps_that_should_have_been_deleted_are_trimmed_on_opening(tmp_path):
    die_in_flush(tmp_path, "maps", "_delete")
    assert list_stores(tmp_path)[0].files.rows == 35
    with ExpertMapStore.open(tmp_path, make_fingerprint(), create=False) as store:
        assert len(store) == 30
        assert store.begin_run("warm", "prompts", resume=True).completed == 25
    assert list_stores(tmp_path)[0].files.rows == 30


@pytest.mark.parametrize("reports", [1, 4])
def test_a_process_killed_anywhere_keeps_what_it_reported(tmp_path, reports):
    command = [sys.executable, "-c", _KILLED_ANYWHERE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for _ in range(reports):
            reported = int(child.stdout.readline())
        child.kill()
        reported = max([reported, *(int(line) for line in child.stdout.read().split("\n")[:-1])])
    with ExpertMapStore.open(tmp_path, make_fingerprint(), create=False) as store:
        assert len(store) >= reported
        run = store.begin_run("warm", "prompts", resume=True)
        assert reported <= run.completed <= len(store) <= reported + 7
        store.publish(make_records(reported))
        assert len(store) <= reported + 7

"""Several processes at one store and one catalog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from store.errors import StoreLockedError
from store.expert_map_store import ExpertMapStore
from store.listing import list_stores
from store.locks import exclusive
from tests.store.samples import make_fingerprint, make_records

PROCESSES, ROUNDS, MAPS = 3, 8, 5

_WRITER = """
import sys
from pathlib import Path
from store.expert_map_store import ExpertMapStore
from tests.store.samples import make_fingerprint, make_records

home, number, rounds, maps = sys.argv[1], *map(int, sys.argv[2:])
print("ready", flush=True)
sys.stdin.readline()
with ExpertMapStore.open(Path(home), make_fingerprint(), capacity=1000) as store:
    store.begin_run("warm", f"prompts-{number}", resume=True)
    for i in range(rounds):
        store.publish(make_records(maps, first=i * maps, iteration=number))
        store.flush((i + 1) * maps)
    store.finish_run()
"""

_HOLDER = """
import sys
from pathlib import Path
from store.locks import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def spawn(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_create_and_write_at_once_lose_nothing(tmp_path):
    writers = [spawn(_WRITER, tmp_path, number, ROUNDS, MAPS) for number in range(PROCESSES)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors
    (listing,) = list_stores(tmp_path)
    assert listing.files.rows == PROCESSES * ROUNDS * MAPS
    with ExpertMapStore.open(tmp_path, make_fingerprint()) as store:
        assert len(store) == PROCESSES * ROUNDS * MAPS
        runs = store.statistics().runs
    assert {run.dataset for run in runs} == {f"prompts-{number}" for number in range(PROCESSES)}
    assert [(run.status, run.completed, run.maps) for run in runs] == [
        ("finished", ROUNDS * MAPS, ROUNDS * MAPS)
    ] * PROCESSES


def test_a_held_lock_is_named_and_freed_with_its_process(tmp_path):
    lock = tmp_path / "store" / "a.lock"
    with spawn(_HOLDER, lock) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreLockedError, match=r"a\.lock: another finemoe process"), exclusive(lock, timeout=0):
            pass
        holder.kill()
    with exclusive(lock, timeout=10):
        pass


def test_compaction_gives_way_to_the_process_that_is_at_it(tmp_path):
    with ExpertMapStore.open(tmp_path, make_fingerprint()) as store:
        store.begin_run("warm")
        store.publish(make_records(3))
        store.finish_run()
        location = list_stores(tmp_path)[0].location
    with spawn(_HOLDER, Path(location) / ".finemoe.lock") as holder:
        assert holder.stdout.readline() == "held\n"
        with ExpertMapStore.open(tmp_path, make_fingerprint()) as store:
            store.begin_run("warm")
            store.publish(make_records(3))
            assert store.finish_run().status == "finished"
        holder.kill()

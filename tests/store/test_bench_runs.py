"""Benchmarks in a catalog on a real SQLite file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.profiles import MachineIdentity
from store.bench_runs import BenchRecord, BenchRuns
from store.catalog import Catalog
from store.errors import BenchRunNotFoundError
from tests.store.samples import make_fingerprint

MODEL = make_fingerprint()
MACHINE = MachineIdentity("cpu", 16, "memory", "a cpu", 2, "2.9", "float32")
RECORD = BenchRecord(
    "lru", "host-driven", "-", 1 << 40, None, {"cache": "25%", "slots": 8}, {"tpot_ms": 1.5, "hit": None}
)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[BenchRuns]:
    catalog = Catalog.open(tmp_path)
    yield BenchRuns(catalog)
    catalog.close()


def begin(kept: BenchRuns, dataset: str = "demo 1") -> str:
    return kept.begin(MODEL, "tiny", MACHINE, dataset, {"cache": "25%"}, {"torch": "2.9"})


def test_records_come_back_in_order_and_whole(kept: BenchRuns) -> None:
    run, other = begin(kept), begin(kept)
    records = [replace(RECORD, policy=name, seed=seed) for name, seed in (("lru", None), ("finemoe", 1), ("a", 2))]
    for record in records:
        kept.add(run, record)
        kept.add(other, RECORD)
    assert kept.records(run) == tuple(records)
    assert list(records[0].to_dict())[:4] == ["policy", "store_state", "executor", "tpot_ms"]


def test_runs_are_listed_with_their_state(kept: BenchRuns) -> None:
    assert kept.runs() == ()
    first, second = begin(kept), begin(kept, "demo 2")
    kept.add(second, RECORD)
    kept.finish(second, "interrupted")
    by_id = {run.id: run for run in kept.runs()}
    assert list(by_id) == [first, second]
    assert (by_id[first].status, by_id[first].records, by_id[first].finished) == ("running", 0, None)
    assert (by_id[second].status, by_id[second].records, by_id[second].dataset) == ("interrupted", 1, "demo 2")
    assert (by_id[second].model, by_id[second].fingerprint, by_id[second].machine) == ("tiny", MODEL.digest, "cpu")
    assert by_id[second].finished is not None


def test_a_run_is_found_by_the_begin_of_its_id(kept: BenchRuns) -> None:
    with pytest.raises(BenchRunNotFoundError, match="no bench run 'last'"):
        kept.find("last")
    runs = [begin(kept) for _ in range(17)]
    assert kept.find("last").id == runs[-1]
    assert kept.find(runs[3]).id == runs[3]
    # Of seventeen ids two begin with the same of sixteen digits.
    digits = [run[0] for run in runs]
    shared = next(digit for digit in digits if digits.count(digit) > 1)
    with pytest.raises(BenchRunNotFoundError, match=f"bench runs begin with '{shared}'"):
        kept.find(shared)
    with pytest.raises(BenchRunNotFoundError, match="no bench run ''"):
        kept.find("")

"""Every policy against every other: miniatures and real routing, budgets, machines, executors, own and foreign stores.

    python -m tests.benchmarks.evaluation FOLDER --output cells.jsonl [--jobs 2] [--redo adaptive]

FOLDER holds mixtral-, phi- and qwen-lmsys.parquet and the same -sharegpt.parquet, recorded from the miniatures with
``finemoe bench record --teacher-force --gate-inputs --turns 1 --prompt-tokens 256``, and gpqa.parquet and
mmlu.parquet, converted from the gpt-oss-20b archives. Each record is appended to the output as it is measured; a cell
that is there is not measured again, unless its policy is named by ``--redo``. Then all that is there is compared.

The tests are the first requests of the 30 % of a trace that are no store by the hash of their numbers, each cut to its
first decode steps. The store is the other 70 % of the same trace, or all of a trace of another prompt set. Whatever a
policy fits, it fits on the store's side. Policies that know no store are replayed with the trace's own store alone.
Times are simulated, with the experts' sizes of the real model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.adaptive_choice import AdaptiveFit
from engine.errors import BudgetError, PolicyError
from engine.hardware import preset
from engine.policy_names import POLICIES, PolicyFactory
from engine.replay import Replay
from engine.trace_files import read_trace
from engine.traces import RoutingTrace
from tests.benchmarks.comparison import compare

CACHES = (0.05, 0.10, 0.25, 0.50, 0.75)
SETTINGS = (("h200", "wait"), ("rtx3090", "in-place"), ("rtx3090", "wait"), ("h200", "in-place"))
STORE_FREE = frozenset({"lru", "lru-layer", "lfu", "on-demand", "mixtral-offloading", "promoe", "oracle", "perfect"})
DISTANCE = 3

Cell = tuple[str, str, str, str, float, str]
"""Test trace, store, machine, executor, cache and policy."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One test trace with one store.

    Attributes:
        test, store: names of traces; the same name divides that trace by request.
        size: the model whose experts' sizes are used.
        group: "hidden states" where gate inputs are known, else "routing only".
    """

    test: str
    store: str
    size: str
    group: str


_TRACES = (
    ("mixtral-lmsys", "mixtral-sharegpt", "mixtral", "hidden states"),
    ("gpqa", "mmlu", "gpt-oss", "routing only"),
    ("qwen-lmsys", "qwen-sharegpt", "qwen1.5", "hidden states"),
    ("mmlu", "gpqa", "gpt-oss", "routing only"),
    ("phi-lmsys", "phi-sharegpt", "phi3.5", "hidden states"),
)
SCENARIOS = tuple(Scenario(test, test, size, group) for test, _, size, group in _TRACES) + tuple(
    Scenario(test, other, size, group) for test, other, size, group in _TRACES
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What of the traces is replayed: test requests, decode steps of each request, maps in a store, warm-up."""

    requests: int
    steps: int
    capacity: int
    warm_up: int


@dataclass(frozen=True, slots=True)
class Task:
    """The cells of one scenario that are to be measured, in this order, and the file they are appended to."""

    folder: Path
    output: Path
    scenario: Scenario
    limits: Limits
    cells: tuple[Cell, ...]


def load(folder: Path, scenario: Scenario, limits: Limits) -> tuple[RoutingTrace, RoutingTrace]:
    """The store's and the test's side."""
    store, test = read_trace(folder / f"{scenario.test}.parquet").decode_only(limits.steps).split(0.7)
    if scenario.store != scenario.test:
        store = read_trace(folder / f"{scenario.store}.parquet").decode_only(limits.steps)
    return store, RoutingTrace(test.manifest, test.requests[: limits.requests])


def measure(task: Task) -> None:
    """Replay a task's cells; those that a policy cannot run are left out."""
    store, test = load(task.folder, task.scenario, task.limits)
    fit = AdaptiveFit(store)
    factories = {}
    for machine in dict.fromkeys(machine for machine, _ in SETTINGS):
        hardware = preset(f"{machine}/{task.scenario.size}")
        factories[machine] = hardware, PolicyFactory(store, test, DISTANCE, task.limits.capacity, hardware, fit)
    for cell in task.cells:
        *_, machine, executor, cache, name = cell
        hardware, factory = factories[machine]
        capacity, in_place = int(cache * test.manifest.keys), executor == "in-place"
        try:
            replay = Replay(test, factory.build(name, capacity, in_place), hardware, capacity, in_place)
        except (BudgetError, PolicyError):
            continue
        outcome = replay.run(task.limits.warm_up)
        record = dict(zip(KEY, cell, strict=True)) | {
            "group": task.scenario.group,
            "tpot_ms": outcome.tpot_seconds * 1e3,
            "hit": outcome.hit,
            "late": outcome.late,
            "miss": outcome.miss,
            "bytes_moved": outcome.bytes_moved,
            "wasted_bytes": outcome.wasted_bytes,
            "iterations": outcome.iterations,
        }
        with task.output.open("a") as output:
            output.write(json.dumps(record) + "\n")


def cells(scenario: Scenario, policies: list[str], settings: list[str]) -> Iterator[Cell]:
    for machine, executor in SETTINGS:
        if f"{machine}/{executor}" not in settings:
            continue
        for cache in CACHES:
            for policy in policies:
                if scenario.store == scenario.test or policy not in STORE_FREE:
                    yield scenario.test, scenario.store, machine, executor, cache, policy


KEY = ("test", "store", "machine", "executor", "cache", "policy")


def read_records(path: Path) -> dict[Cell, dict[str, Any]]:
    """The records of an output file, the latest of each cell; policies without a store in every cell of their test."""
    if not path.exists():
        return {}
    records = {tuple(record[name] for name in KEY): record for record in map(json.loads, path.read_text().splitlines())}
    for scenario in SCENARIOS:
        for cell in [cell for cell in records if cell[:2] == (scenario.test, scenario.test)]:
            if cell[-1] in STORE_FREE and any(c[:2] == (scenario.test, scenario.store) for c in records):
                foreign = (scenario.test, scenario.store, *cell[2:])
                records[foreign] = records[cell] | {"store": scenario.store}
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, a record a cell and policy")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--policies", default=",".join(p.name for p in POLICIES))
    parser.add_argument("--only", default="", help="scenarios, as TEST/STORE; without, all")
    parser.add_argument("--settings", default=",".join("/".join(s) for s in SETTINGS), help="as MACHINE/EXECUTOR")
    parser.add_argument("--redo", default="", help="policies to measure again")
    parser.add_argument("--requests", type=int, default=20, help="test requests")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a request")
    parser.add_argument("--capacity", type=int, default=1000, help="maps a store holds")
    parser.add_argument("--warm-up", type=int, default=100, help="iterations that are not counted")
    arguments = parser.parse_args()
    limits = Limits(arguments.requests, arguments.steps, arguments.capacity, arguments.warm_up)
    again = arguments.redo.split(",")
    done = {cell for cell in read_records(arguments.output) if cell[-1] not in again}
    tasks = []
    for scenario in SCENARIOS:
        wanted = cells(scenario, arguments.policies.split(","), arguments.settings.split(","))
        missing = tuple(cell for cell in wanted if cell not in done)
        if missing and (not arguments.only or f"{scenario.test}/{scenario.store}" in arguments.only.split(",")):
            tasks.append(Task(arguments.folder, arguments.output, scenario, limits, missing))
    with ProcessPoolExecutor(arguments.jobs) as pool:
        list(pool.map(measure, tasks))
    print(f"{limits}, distance {DISTANCE}")
    compare(list(read_records(arguments.output).values()))


if __name__ == "__main__":
    main()

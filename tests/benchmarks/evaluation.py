"""Every policy against every other: miniatures and real routing, budgets, machines, executors, own and foreign stores.

    python -m tests.benchmarks.evaluation FOLDER --output cells.jsonl [--jobs 2] [--redo adaptive]

FOLDER holds mixtral-, phi- and qwen-lmsys.parquet and the same -sharegpt.parquet, recorded from the miniatures with
``finemoe bench record --teacher-force --gate-inputs --turns 1 --prompt-tokens 256``, and gpqa.parquet and
mmlu.parquet, converted from the gpt-oss-20b archives. Each record is appended to the output as it is measured; a cell
that is there is not measured again, unless its policy is named by ``--redo``. Then the comparison is printed.

The tests are the first requests of the 30 % of a trace that are no store by the hash of their numbers, each cut to its
first decode steps. The store is the other 70 % of the same trace, or all of a trace of another prompt set. Whatever a
policy fits, it fits on the store's side. Times are simulated, with the experts' sizes of the real model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BudgetError, PolicyError
from engine.hardware import preset
from engine.policy_names import POLICIES, PolicyFactory
from engine.replay import Replay
from engine.trace_files import read_trace
from engine.traces import RoutingTrace
from tests.benchmarks.comparison import compare

CACHES = (0.05, 0.10, 0.25, 0.50, 0.75)
MACHINES = ("rtx3090", "h200")
EXECUTORS = ("wait", "in-place")
DISTANCE = 3


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


SCENARIOS = tuple(
    Scenario(f"{mini}-lmsys", f"{mini}-{store}", size, "hidden states")
    for mini, size in (("mixtral", "mixtral"), ("phi", "phi3.5"), ("qwen", "qwen1.5"))
    for store in ("lmsys", "sharegpt")
) + tuple(
    Scenario(test, store, "gpt-oss", "routing only")
    for test, other in (("gpqa", "mmlu"), ("mmlu", "gpqa"))
    for store in (test, other)
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
    """The cells of one scenario on one machine that are to be measured, by executor, cache and policy."""

    folder: Path
    scenario: Scenario
    machine: str
    limits: Limits
    cells: tuple[tuple[str, float, str], ...]


def load(folder: Path, scenario: Scenario, limits: Limits) -> tuple[RoutingTrace, RoutingTrace]:
    """The store's and the test's side."""
    store, test = read_trace(folder / f"{scenario.test}.parquet").decode_only(limits.steps).split(0.7)
    if scenario.store != scenario.test:
        store = read_trace(folder / f"{scenario.store}.parquet").decode_only(limits.steps)
    return store, RoutingTrace(test.manifest, test.requests[: limits.requests])


def measure(task: Task) -> list[dict[str, Any]]:
    """Replay a task's cells; those that a policy cannot run are left out."""
    store, test = load(task.folder, task.scenario, task.limits)
    hardware = preset(f"{task.machine}/{task.scenario.size}")
    factory = PolicyFactory(store, test, DISTANCE, task.limits.capacity, hardware)
    records = []
    for executor, cache, name in task.cells:
        capacity = int(cache * test.manifest.keys)
        try:
            replay = Replay(
                test, factory.build(name, capacity, executor == "in-place"), hardware, capacity, executor == "in-place"
            )
        except (BudgetError, PolicyError):
            continue
        outcome = replay.run(task.limits.warm_up)
        records.append(
            {
                "test": task.scenario.test,
                "store": task.scenario.store,
                "group": task.scenario.group,
                "machine": task.machine,
                "executor": executor,
                "cache": cache,
                "policy": name,
                "tpot_ms": outcome.tpot_seconds * 1e3,
                "hit": outcome.hit,
                "late": outcome.late,
                "miss": outcome.miss,
                "bytes_moved": outcome.bytes_moved,
                "wasted_bytes": outcome.wasted_bytes,
                "iterations": outcome.iterations,
            }
        )
    return records


def plan(
    folder: Path, limits: Limits, scenarios: Sequence[Scenario], policies: Sequence[str], done: set[tuple[Any, ...]]
) -> Iterator[Task]:
    for scenario in scenarios:
        for machine in MACHINES:
            cells = tuple(
                (executor, cache, policy)
                for executor in EXECUTORS
                for cache in CACHES
                for policy in policies
                if (scenario.test, scenario.store, machine, executor, cache, policy) not in done
            )
            if cells:
                yield Task(folder, scenario, machine, limits, cells)


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("test", "store", "machine", "executor", "cache", "policy"))


def read_records(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The records of an output file, the latest of each cell."""
    if not path.exists():
        return {}
    return {key(record): record for record in map(json.loads, path.read_text().splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, a record a cell and policy")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--policies", default=",".join(p.name for p in POLICIES))
    parser.add_argument("--only", default="", help="test traces; without, all")
    parser.add_argument("--redo", default="", help="policies to measure again")
    parser.add_argument("--requests", type=int, default=24, help="test requests")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a request")
    parser.add_argument("--capacity", type=int, default=1000, help="maps a store holds")
    parser.add_argument("--warm-up", type=int, default=100, help="iterations that are not counted")
    arguments = parser.parse_args()
    limits = Limits(arguments.requests, arguments.steps, arguments.capacity, arguments.warm_up)
    again = arguments.redo.split(",")
    done = {cell for cell in read_records(arguments.output) if cell[-1] not in again}
    scenarios = [s for s in SCENARIOS if not arguments.only or s.test in arguments.only.split(",")]
    tasks = list(plan(arguments.folder, limits, scenarios, arguments.policies.split(","), done))
    with arguments.output.open("a") as output, ProcessPoolExecutor(arguments.jobs) as pool:
        for records in pool.map(measure, tasks):
            output.writelines(json.dumps(record) + "\n" for record in records)
            output.flush()
    print(f"{limits}, distance {DISTANCE}")
    compare(list(read_records(arguments.output).values()))


if __name__ == "__main__":
    main()

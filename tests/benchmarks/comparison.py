"""What the records of an evaluation say: the policies of each cell, losses of ``adaptive``, closure and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.policy_names import POLICIES, SPECULATIVE

Cell = dict[str, dict[str, Any]]
"""The records of one place and cache, by policy."""

Place = tuple[str, ...]
"""Group, test, store, machine, executor."""

BOUNDS = ("oracle", "perfect")
OURS = "adaptive"
# The others need gate inputs, or room for a token in every layer's share.
REQUIRED = {policy.name for policy in POLICIES} - SPECULATIVE - {"lru-layer"}
# Simulated times are exact: what is closer than this is the same decision, not a tie by luck.
_SAME = 1e-6


def compare(records: Sequence[dict[str, Any]]) -> None:
    """Print a table a scenario, machine and executor, and the averages over all cells that are complete."""
    tables: dict[Place, dict[float, Cell]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        place = tuple(record[name] for name in ("group", "test", "store", "machine", "executor"))
        tables[place][record["cache"]][record["policy"]] = record
    everything = []
    for place, cells in tables.items():
        complete = {cache: cell for cache, cell in sorted(cells.items()) if cell.keys() >= REQUIRED}
        if complete:
            _print_table(place, complete)
        everything += [(place, cache, cell) for cache, cell in complete.items()]
    _print_closures("closure", everything, ("perfect",))
    _print_closures("closure against the better of oracle and perfect", everything, BOUNDS)
    _print_losses(everything)
    _print_bytes(everything)


def baseline(cell: Cell) -> float:
    """TPOT of the better of global and per-layer LRU, the latter where every layer has room for a token."""
    return min(cell[name]["tpot_ms"] for name in ("lru", "lru-layer") if name in cell)


def closure(cell: Cell, policy: str, bounds: Sequence[str] = ("perfect",)) -> float:
    """The share of the way from LRU to perfect knowledge that a policy goes.

    Where experts are read in place, a prefetch that comes late is transferred twice: on a full link Belady's eviction
    without any prefetch is then faster than ``perfect``, and shares above 1 are possible.
    """
    start, end = baseline(cell), min(cell[bound]["tpot_ms"] for bound in bounds)
    return (start - cell[policy]["tpot_ms"]) / (start - end)


def _print_table(place: Place, cells: dict[float, Cell]) -> None:
    group, test, store, machine, executor = place
    caches = sorted(cells)
    print(f"\n### {test}, store {store}, {machine}, {executor} ({group}): TPOT ms (closure)\n")
    print("| policy | " + " | ".join(f"{cache:.0%}" for cache in caches) + " |")
    print("|---" * (len(caches) + 1) + "|")
    names = dict.fromkeys(name for cache in caches for name in cells[cache])
    for name in names:
        shown = []
        for cache in caches:
            cell = cells[cache]
            mark = f" ({closure(cell, name):.2f})" if name in cell else ""
            lost = " LOSS" if name == OURS and _winner(cell) is not None else ""
            shown.append(f"{cell[name]['tpot_ms']:.2f}{mark}{lost}" if name in cell else "-")
        print(f"| {name} | " + " | ".join(shown) + " |")


def _winner(cell: Cell) -> str | None:
    """The realisable policy that is faster than ours, if any."""
    rivals = [name for name in cell if name not in (*BOUNDS, OURS)]
    best = min(rivals, key=lambda name: cell[name]["tpot_ms"])
    return best if cell[best]["tpot_ms"] < cell[OURS]["tpot_ms"] * (1 - _SAME) else None


def _print_closures(title: str, everything: Sequence[tuple[Place, float, Cell]], bounds: Sequence[str]) -> None:
    print(f"\n### {title}, averaged over cells\n")
    names = dict.fromkeys(name for _, _, cell in everything for name in cell)
    groups = [lambda p, g=group: p[0] == g for group in dict.fromkeys(place[0] for place, _, _ in everything)]
    titles = list(dict.fromkeys(place[0] for place, _, _ in everything))
    for executor in dict.fromkeys(place[4] for place, _, _ in everything):
        groups.append(lambda p, e=executor: p[4] == e)
        titles.append(executor)
    for store, foreign in (("own store", False), ("foreign store", True)):
        groups.append(lambda p, f=foreign: (p[1] != p[2]) is f)
        titles.append(store)
    print("| policy | all | " + " | ".join(titles) + " |")
    print("|---" * (len(titles) + 2) + "|")
    for name in names:
        columns = []
        for belongs in (lambda p: True, *groups):
            values = [closure(cell, name, bounds) for place, _, cell in everything if name in cell and belongs(place)]
            columns.append(f"{np.mean(values):.3f}" if values else "-")
        print(f"| {name} | " + " | ".join(columns) + " |")


def _print_losses(everything: Sequence[tuple[Place, float, Cell]]) -> None:
    lost = [(place, cache, cell, winner) for place, cache, cell in everything if (winner := _winner(cell)) is not None]
    print(f"\n### cells in which {OURS} is beaten: {len(lost)} of {len(everything)}\n")
    for place, cache, cell, winner in lost:
        behind = cell[OURS]["tpot_ms"] / cell[winner]["tpot_ms"] - 1
        print(f"- {', '.join(place[1:])}, {cache:.0%}: {winner} is {behind:.2%} faster")


def _print_bytes(everything: Sequence[tuple[Place, float, Cell]]) -> None:
    print("\n### bytes moved, relative to lru\n")
    print("| policy | mean | largest | cells above 1.05 |")
    print("|---|---|---|---|")
    for name in dict.fromkeys(name for _, _, cell in everything for name in cell):
        cells = [cell for _, _, cell in everything if name in cell]
        ratios = np.array([cell[name]["bytes_moved"] / cell["lru"]["bytes_moved"] for cell in cells])
        print(f"| {name} | {ratios.mean():.3f} | {ratios.max():.3f} | {(ratios > 1.05).sum()} of {len(ratios)} |")

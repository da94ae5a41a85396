"""Recompute the tables of the study (FINDINGS) beside its numbers: one command each.

    python -m tests.benchmarks.findings A FOLDER       policies, TPOT relative to on-demand LRU
    python -m tests.benchmarks.findings A2 FOLDER      adaptive, without and with hidden states, beside the study's V5
    python -m tests.benchmarks.findings B FOLDER       recall of predictors by distance
    python -m tests.benchmarks.findings F FOLDER       next-token overlap of experts against chance

FOLDER holds the traces that ``evaluation`` names. Numbers stand as here/study. Where they differ:

* Requests. The study had 249 conversations of a miniature and tested 75; FOLDER has fewer, drawn by another seed,
  and ``--requests`` and ``--steps`` cut the tests. For gpt-oss it took 90 requests it does not name, cut to 256 tokens;
  here they are the test side of mmlu.
* The first layers of gpt-oss were guided by equal token strings, which the archives do not hold; here nothing guides
  them but ``adaptive``'s mix.
* The study kept 1000 maps by redundancy; here they are an even choice (it found the two alike).
* Policies of MoE-Infinity and ProMoE are readings of their papers, there and here, and not the same ones.
* ``adaptive`` is not the study's V5: it values experts by mixes fitted to their discounted next use, and chooses its
  settings by replays of the store's side. It stands beside V5a without hidden states and beside V5c with them.
* Here the experts of a layer keep their room until their products are done, and prefetches that cannot arrive in time
  are not sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.errors import BudgetError, PolicyError
from engine.hardware import Hardware
from engine.policy_names import POLICIES, PolicyFactory
from engine.replay import Replay, ReplayOutcome
from engine.trace_files import read_trace
from engine.traces import RoutingTrace
from tests.benchmarks.published import CACHES, LRU, MODELS, OVERLAP, OVERVIEW, RECOMMENDED, REGIMES
from tests.benchmarks.recall import print_recall

FILES = {"mixtral": "mixtral-lmsys", "phi": "phi-lmsys", "qwen": "qwen-lmsys", "gpt-oss": "mmlu"}
STUDY_STEPS = 256


def without_hidden_states(trace: RoutingTrace) -> RoutingTrace:
    """The same routing as one knows it who cannot see what the gates read."""
    manifest = replace(trace.manifest, gate_inputs=False, gates=None)
    return RoutingTrace(manifest, tuple(replace(request, gate_inputs=None) for request in trace.requests))


def replay(factory: PolicyFactory, test: RoutingTrace, name: str, hardware: Hardware, cache: str) -> ReplayOutcome:
    capacity = int(CACHES[cache] * test.manifest.keys)
    return Replay(test, factory.build(name, capacity), hardware, capacity, False).run()


def overview(model: str, store: RoutingTrace, test: RoutingTrace, caches: list[str]) -> None:
    """Table A of one model."""
    hardware = REGIMES[model]
    factory = PolicyFactory(store, test, 3, 1000, hardware)
    outcomes: dict[tuple[str, str], ReplayOutcome] = {}
    for name in (policy.name for policy in POLICIES):
        for cache in caches:
            try:
                outcomes[name, cache] = replay(factory, test, name, hardware, cache)
            except (BudgetError, PolicyError):
                continue
    print("| policy | " + " | ".join(caches) + " |")
    print("|---" * (len(caches) + 1) + "|")
    for name in dict.fromkeys(name for name, _ in outcomes):
        shown = []
        for cache in caches:
            place, outcome = list(CACHES).index(cache), outcomes.get((name, cache))
            published = OVERVIEW.get(name, {}).get(model, (None,) * len(CACHES))[place]
            if outcome is None:
                shown.append("-")
                continue
            ratio = outcome.tpot_seconds / outcomes["lru", cache].tpot_seconds
            shown.append(f"{ratio:.3f}/{'-' if published is None else f'{published:.3f}'}")
        print(f"| {name} | " + " | ".join(shown) + " |")
    absolute = []
    for cache in caches:
        outcome, (tpot, hit) = outcomes["lru", cache], LRU[model][list(CACHES).index(cache)]
        absolute.append(f"{outcome.tpot_seconds * 1e3:.2f}/{tpot:.2f} ms, {outcome.hit:.3f}/{hit:.3f}")
    print("| LRU: TPOT, hit rate | " + " | ".join(absolute) + " |")


def recommended(model: str, store: RoutingTrace, test: RoutingTrace, caches: list[str]) -> None:
    """Table A2 of one model: TPOT relative to LRU, hit + late and loads a token, here and in the study."""
    hardware = REGIMES[model]
    blind = PolicyFactory(without_hidden_states(store), without_hidden_states(test), 3, 1000, hardware)
    seeing = blind if test.manifest.gates is None else PolicyFactory(store, test, 3, 1000, hardware)
    outcomes = {
        ("V5a no hidden states", cache): replay(blind, test, "adaptive", hardware, cache) for cache in caches
    } | {("oracle prefetch + Belady", cache): replay(blind, test, "perfect", hardware, cache) for cache in caches}
    if seeing is not blind:
        outcomes |= {("V5c trained", cache): replay(seeing, test, "adaptive", hardware, cache) for cache in caches}
    lru = {cache: replay(blind, test, "lru", hardware, cache) for cache in caches}

    print("| the study's row | " + " | ".join(caches) + " |")
    print("|---" * (len(caches) + 1) + "|")
    for row in RECOMMENDED:
        shown = []
        for cache in caches:
            published = RECOMMENDED[row].get(model)
            study = (
                "-" if published is None else "{:.3f} ({:.3f}; {:.1f})".format(*published[list(CACHES).index(cache)])
            )
            outcome = outcomes.get((row, cache))
            if outcome is None:
                shown.append(f"-/{study}")
                continue
            loads = outcome.bytes_moved / hardware.expert_bytes / outcome.iterations
            ratio = outcome.tpot_seconds / lru[cache].tpot_seconds
            shown.append(f"{ratio:.3f} ({outcome.hit + outcome.late:.3f}; {loads:.1f})/{study}")
        print(f"| {row} | " + " | ".join(shown) + " |")


def overlap(model: str, store: RoutingTrace, test: RoutingTrace, caches: list[str]) -> None:
    """Table F of one model: the share of a token's experts that the next token uses again."""
    experts, top_k = test.manifest.experts, test.manifest.top_k
    shares = []
    for request in (*store.requests, *test.requests):
        uses = request.uses(experts)
        shares.append((uses[1:] * uses[:-1]).sum(axis=2).reshape(-1) / top_k)
    here, chance = float(np.concatenate(shares).mean()), top_k / experts
    study, its_chance = OVERLAP[model]
    print(f"overlap {here:.3f}/{study:.3f}, chance {chance:.3f}/{its_chance:.3f}, ratio {here / chance:.2f}")


def recall(model: str, store: RoutingTrace, test: RoutingTrace, caches: list[str]) -> None:
    """Table B of one model."""
    print_recall(model, store, test)


TABLES: dict[str, Callable[[str, RoutingTrace, RoutingTrace, list[str]], None]] = {
    "A": overview,
    "A2": recommended,
    "B": recall,
    "F": overlap,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(MODELS), help="comma list out of " + ", ".join(MODELS))
    parser.add_argument("--cache", default=",".join(CACHES), help="comma list out of " + ", ".join(CACHES))
    parser.add_argument("--requests", type=int, default=24, help="test requests")
    parser.add_argument("--steps", type=int, default=128, help=f"decode steps of a request; the study: {STUDY_STEPS}")
    arguments = parser.parse_args()
    for model in arguments.models.split(","):
        whole = read_trace(arguments.folder / f"{FILES[model]}.parquet").decode_only(arguments.steps)
        store, test = whole.split(0.7)
        test = RoutingTrace(test.manifest, test.requests[: arguments.requests])
        print(f"\n### {arguments.table}, {MODELS[model]}: here/study; {test.iterations} steps tested\n", flush=True)
        TABLES[arguments.table](model, store, test, arguments.cache.split(","))


if __name__ == "__main__":
    main()

"""Recompute the tables of the study (FINDINGS) beside its numbers: one command each.

    python -m tests.benchmarks.findings A FOLDER       policies, TPOT relative to on-demand LRU
    python -m tests.benchmarks.findings A2 FOLDER      adaptive, without and with hidden states, beside the study's V5
    python -m tests.benchmarks.findings B FOLDER       recall of predictors by distance
    python -m tests.benchmarks.findings F FOLDER       next-token overlap of experts against chance
    python -m tests.benchmarks.findings A,A2 FOLDER    both, without replaying anything twice

FOLDER holds the traces that ``evaluation`` names. Numbers stand as here/study. Where they differ:

* Requests. The study had 249 conversations of a miniature and tested 75; FOLDER has fewer, drawn by another seed,
  and ``--requests`` and ``--steps`` cut the tests. For gpt-oss it took 90 requests it does not name, cut to 256 tokens;
  here they are the test side of mmlu.
* The first layers of gpt-oss were guided by equal token strings, which the archives do not hold; here nothing guides
  them but ``adaptive``'s mix.
* The study kept 1000 maps by redundancy; here they are an even choice (it found the two alike).
* Rules that count uses and never forget grow worse as a test goes on: with 8, 16 and 46 test requests of qwen at 25 %
  lfu takes 0.90, 1.00 and 1.07 of LRU's time, finemoe-cached-freq 0.93, 0.94 and 0.99; the study had 75 (1.15, 1.09).
* The policies of MoE-Infinity and ProMoE are readings of their papers, there and here, and not the same ones: the
  study's stride of ProMoE was trained, here the gates themselves are applied.
* ``adaptive`` is not the study's V5: it values experts by mixes fitted to their discounted next use, and chooses its
  settings by replays of the store's side. It stands beside V5a without hidden states and beside V5c with them.
* Here the experts of a layer keep their room until their products are done, and prefetches that cannot arrive in time
  are not sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from engine.errors import BudgetError, PolicyError
from engine.policy_names import POLICIES, PolicyFactory
from engine.replay import Replay, ReplayOutcome
from engine.trace_files import read_trace
from engine.traces import RoutingTrace
from tests.benchmarks.published import CACHES, LRU, MODELS, OVERLAP, OVERVIEW, RECOMMENDED, REGIMES
from tests.benchmarks.recall import print_recall

FILES = {"mixtral": "mixtral-lmsys", "phi": "phi-lmsys", "qwen": "qwen-lmsys", "gpt-oss": "mmlu"}
DISTANCE, MAPS = 3, 1000


def without_hidden_states(trace: RoutingTrace) -> RoutingTrace:
    """The same routing as one knows it who cannot see what the gates read."""
    manifest = replace(trace.manifest, gate_inputs=False, gates=None)
    return RoutingTrace(manifest, tuple(replace(request, gate_inputs=None) for request in trace.requests))


class Regime:
    """One model's traces in the study's time model; a replay that several tables need is run once."""

    def __init__(self, model: str, store: RoutingTrace, test: RoutingTrace) -> None:
        self.model = model
        self.store = store
        self.test = test
        self.hardware = REGIMES[model]
        self.outcome = cache(self._outcome)
        self._factory = cache(self._make_factory)

    @property
    def has_hidden_states(self) -> bool:
        return self.test.manifest.gates is not None

    def _make_factory(self, seeing: bool) -> PolicyFactory:
        store, test = (t if seeing else without_hidden_states(t) for t in (self.store, self.test))
        return PolicyFactory(store, test, DISTANCE, MAPS, self.hardware)

    def _outcome(self, name: str, share: str, seeing: bool) -> ReplayOutcome | None:
        """A policy's replay with a share of the experts cached; None where the trace or the room forbids it."""
        capacity = int(CACHES[share] * self.test.manifest.keys)
        try:
            policy = self._factory(seeing and self.has_hidden_states).build(name, capacity)
            return Replay(self.test, policy, self.hardware, capacity, False).run()
        except (BudgetError, PolicyError):
            return None

    def ratio(self, outcome: ReplayOutcome, share: str) -> float:
        """TPOT relative to on-demand LRU."""
        lru = self.outcome("lru", share, True)
        assert lru is not None
        return outcome.tpot_seconds / lru.tpot_seconds


def overview(regime: Regime, shares: list[str]) -> None:
    """Table A of one model; ``adaptive`` stands in A2."""
    rows = []
    for name in (policy.name for policy in POLICIES if policy.name != "adaptive"):
        shown = []
        for share in shares:
            outcome = regime.outcome(name, share, True)
            study = OVERVIEW.get(name, {}).get(regime.model, (None,) * len(CACHES))[list(CACHES).index(share)]
            here = "-" if outcome is None else f"{regime.ratio(outcome, share):.3f}"
            shown.append(f"{here}/{'-' if study is None else f'{study:.3f}'}")
        rows.append((name, shown))
    absolute = []
    for share in shares:
        outcome, (tpot, hit) = regime.outcome("lru", share, True), LRU[regime.model][list(CACHES).index(share)]
        assert outcome is not None
        absolute.append(f"{outcome.tpot_seconds * 1e3:.2f}/{tpot:.2f} ms, {outcome.hit:.3f}/{hit:.3f}")
    _print_rows("policy", shares, [*rows, ("LRU: TPOT, hit rate", absolute)])


def recommended(regime: Regime, shares: list[str]) -> None:
    """Table A2 of one model: TPOT relative to LRU, hit + late and loads a token, here and in the study."""
    ours = {
        "V5a no hidden states": ("adaptive", False),
        "V5c trained": ("adaptive", True),
        "oracle prefetch + Belady": ("perfect", True),
    }
    rows = []
    for row, published in RECOMMENDED.items():
        shown = []
        for share in shares:
            figures = published.get(regime.model)
            study = "-" if figures is None else "{:.3f} ({:.3f}; {:.1f})".format(*figures[list(CACHES).index(share)])
            outcome = None
            if row in ours and (row != "V5c trained" or regime.has_hidden_states):
                outcome = regime.outcome(ours[row][0], share, ours[row][1])
            if outcome is None:
                shown.append(f"-/{study}")
                continue
            loads = outcome.bytes_moved / regime.hardware.expert_bytes / outcome.iterations
            here = f"{regime.ratio(outcome, share):.3f} ({outcome.hit + outcome.late:.3f}; {loads:.1f})"
            shown.append(f"{here}/{study}")
        rows.append((row, shown))
    _print_rows("the study's row", shares, rows)


def _print_rows(title: str, shares: list[str], rows: list[tuple[str, list[str]]]) -> None:
    print(f"| {title} | " + " | ".join(shares) + " |")
    print("|---" * (len(shares) + 1) + "|")
    for name, shown in rows:
        print(f"| {name} | " + " | ".join(shown) + " |")


def overlap(regime: Regime, shares: list[str]) -> None:
    """Table F of one model: the share of a token's experts that the next token uses again."""
    experts, top_k = regime.test.manifest.experts, regime.test.manifest.top_k
    repeated = []
    for request in (*regime.store.requests, *regime.test.requests):
        uses = request.uses(experts)
        repeated.append((uses[1:] * uses[:-1]).sum(axis=2).reshape(-1) / top_k)
    here, chance = float(np.concatenate(repeated).mean()), top_k / experts
    study, its_chance = OVERLAP[regime.model]
    print(f"overlap {here:.3f}/{study:.3f}, chance {chance:.3f}/{its_chance:.3f}, ratio {here / chance:.2f}")


def recall(regime: Regime, shares: list[str]) -> None:
    """Table B of one model."""
    print_recall(regime.model, regime.store, regime.test)


TABLES: dict[str, Callable[[Regime, list[str]], None]] = {
    "A": overview,
    "A2": recommended,
    "B": recall,
    "F": overlap,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", help="comma list out of " + ", ".join(TABLES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(MODELS), help="comma list out of " + ", ".join(MODELS))
    parser.add_argument("--cache", default=",".join(CACHES), help="comma list out of " + ", ".join(CACHES))
    parser.add_argument("--requests", type=int, default=24, help="test requests")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a request; the study: 256 of gpt-oss")
    arguments = parser.parse_args()
    for model in arguments.models.split(","):
        whole = read_trace(arguments.folder / f"{FILES[model]}.parquet").decode_only(arguments.steps)
        store, test = whole.split(0.7)
        regime = Regime(model, store, RoutingTrace(test.manifest, test.requests[: arguments.requests]))
        for table in arguments.tables.split(","):
            print(f"\n### {table}, {MODELS[model]}: here/study; {regime.test.iterations} steps tested\n", flush=True)
            TABLES[table](regime, arguments.cache.split(","))


if __name__ == "__main__":
    main()

"""Recompute the overview of the study (FINDINGS, table A, gpt-oss) beside its numbers.

    python -m tests.benchmarks.findings ../shared/traces/gpt-oss-20b__gpqa_main.npz --cache 10%,25%

TPOT relative to on-demand LRU. The study replayed 27 of 90 requests it does not name, guided the first layers by equal
token strings, which the archives do not hold, and kept its store by redundancy: expect a few hundredths.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from engine.hardware import Hardware
from engine.policy_names import PolicyFactory
from engine.replay import Replay
from engine.trace_files import read_trace
from engine.trace_import import import_routing

# A copy of 0.24 ms, a layer of 0.1 ms, transfers that stop anywhere: the study's gpt-oss regime.
STUDY = Hardware(
    expert_bytes=13_219_200, bandwidth=13_219_200 / 0.24e-3, latency=0.0, layer_seconds=0.1e-3, chunk_bytes=0
)
SHARES = {"10%": 0.10, "25%": 0.25, "50%": 0.50, "75%": 0.75}
PUBLISHED = {
    "lru-layer": (None, 0.916, 1.066, 1.079),
    "lfu": (0.778, 1.178, 1.459, 1.194),
    "moe-infinity": (0.761, 1.144, 1.423, 1.185),
    "map-t+s+delta": (0.945, 0.953, 1.033, 1.000),
    "finemoe": (0.777, 0.921, 1.019, 0.999),
    "finemoe-cached-freq": (0.779, 0.921, 1.019, 0.999),
    "adaptive": (0.555, 0.684, 0.833, 0.980),
    "oracle": (0.502, 0.566, 0.709, 0.932),
    "perfect": (0.412, 0.363, 0.536, 0.891),
}
DECODE_STEPS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--cache", default=",".join(SHARES), help="comma list out of " + ", ".join(SHARES))
    parser.add_argument("--requests", type=int, default=None, help="replay only so many of the test requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "trace.parquet"
        import_routing(arguments.archive, target)
        store, test = read_trace(target).decode_only(DECODE_STEPS).split(0.7)
    test = type(test)(test.manifest, test.requests[: arguments.requests])
    factory = PolicyFactory(store, test, 3, 1000, STUDY)
    print(f"{'cache':6} {'policy':20} {'here':>6} {'study':>6} {'hit':>6} {'+late':>6}")
    for cache in arguments.cache.split(","):
        capacity = int(SHARES[cache] * test.manifest.keys)
        baseline = Replay(test, factory.build("lru", capacity), STUDY, capacity, False).run()
        for name, published in PUBLISHED.items():
            study = published[list(SHARES).index(cache)]
            if study is None:
                continue
            outcome = Replay(test, factory.build(name, capacity), STUDY, capacity, False).run()
            ratio = outcome.tpot_seconds / baseline.tpot_seconds
            print(
                f"{cache:6} {name:20} {ratio:6.3f} {study:6.3f} {outcome.hit:6.3f} {outcome.hit + outcome.late:6.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""How fast a replay is: expert accesses a second of one core, searches and predictions included.

    python -m tests.benchmarks.replay_speed TRACE.parquet [--policies lru,finemoe] [--cache 0.25]

Asked for are 200,000 for lru and 50,000 for finemoe (each by itself, from a fresh store; what adaptive fits beforehand
is not counted). The processor's time counts, so that a busy machine does not; the best of several runs is reported. Set
OMP_NUM_THREADS=1, or searches use more cores.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from engine.hardware import preset
from engine.policy_names import PolicyFactory
from engine.replay import Replay
from engine.trace_files import read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policies", default="lru,finemoe")
    parser.add_argument("--cache", type=float, default=0.25)
    parser.add_argument("--hardware", default="h200/gpt-oss")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a request")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    store, test = read_trace(arguments.trace).decode_only(arguments.steps).split(0.7)
    hardware = preset(arguments.hardware)
    capacity = int(arguments.cache * test.manifest.keys)
    print(f"{test.accesses:,} accesses; {test.manifest.layers} x {test.manifest.experts} top-{test.manifest.top_k}")
    for name in arguments.policies.split(","):
        seconds = []
        for _ in range(arguments.repeat):
            factory = PolicyFactory(store, test, 3, 1000, hardware)
            policy = factory.build(name, capacity)
            start = time.process_time()
            Replay(test, policy, hardware, capacity, False).run()
            seconds.append(time.process_time() - start)
        print(f"{name}: {test.accesses / min(seconds):,.0f} accesses/s")


if __name__ == "__main__":
    main()

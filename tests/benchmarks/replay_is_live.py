"""Whether the live engine and the replay of its own trace count alike, for every policy.

    python -m tests.benchmarks.replay_is_live --model ../shared/models/mini-qwen1.5-moe \
        --dataset ../shared/prompts/lmsys_like.jsonl

Engine and replay share a virtual clock, in which an expert crosses the link in 1 s and a layer computes for
``--layer-seconds``. The store is filled from the first prompts, the next ones are answered greedily. Prints hits, late,
misses, bytes and stalls of both sides and whether they are equal; ends with the number of differences.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from engine.policy_names import POLICIES
from engine.prompts import open_prompts
from engine.source import resolve_model
from tests.engine.live_replay import run_live, run_replay, set_scene


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--stored", type=int, default=20, help="prompts that fill the store")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--layer-seconds", type=float, default=0.3)
    parser.add_argument("--cache", default="10%,25%")
    parser.add_argument("--policies", default=",".join(policy.name for policy in POLICIES))
    arguments = parser.parse_args()
    conversations = list(open_prompts(arguments.dataset, limit=arguments.stored + arguments.requests))
    prompts = [conversation.prompts()[0][-1].content[:600] for conversation in conversations]
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        scene = set_scene(
            resolve_model(arguments.model),
            prompts[: arguments.stored],
            prompts[arguments.stored :],
            arguments.new_tokens,
            Path(folder),
        )
        for cache in arguments.cache.split(","):
            for policy in arguments.policies.split(","):
                path = Path(folder) / "live.parquet"
                live, slots = run_live(scene, policy, cache, arguments.layer_seconds, path)
                replayed = run_replay(scene, policy, slots, arguments.layer_seconds, path)
                different += live != replayed
                verdict = "equal" if live == replayed else f"DIFFERENT from {replayed}"
                print(f"{cache:5} {policy:20} {live} {verdict}", flush=True)
    print(f"{different} differences")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()

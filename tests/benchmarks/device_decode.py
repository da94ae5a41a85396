"""Decode speed of a full-size shape with synthetic weights and replayed routing, by budget, policy and executor.

    python -m tests.benchmarks.device_decode qwen1.5-moe qwen.parquet --cells 100%:lru:device 25%:lfu:device --resident

needs a CUDA device. The trace is of a trained model with the same L, J and K; a cell is budget:policy:executor.
``--resident`` times transformers' own experts implementations on the same shape, all experts resident, random routing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterable
from pathlib import Path

import torch

from engine.architecture import model_class
from engine.budget import ExpertBudget
from engine.checkpoint import LoadedModel
from engine.engine import Engine
from engine.resident import ResidentModel
from engine.source import ModelSource
from engine.steps import GenerationSettings, Step, Traffic
from engine.synthetic import ReplayedRouting, synthesize
from engine.trace_files import read_trace

LINK_BANDWIDTH = 55e9
PROMPT = list(range(5, 37))
SETTLING = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--cells", nargs="+", default=["100%:lru:device", "50%:lru:device", "25%:lru:device"])
    parser.add_argument("--warm", type=int, default=130, help="tokens before the measured reply")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--resident", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda")
    source, loaded = synthesize(options.shape, device, torch.bfloat16)
    routing = ReplayedRouting(loaded.layers, read_trace(options.trace), device)
    routing.attach()
    print("| shape | cell | ms/token | median | p99 | hit | in place MB | copied MB | link ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for cell in options.cells:
        routing.rewind()
        steps = measure(source, loaded, cell, options.warm, options.tokens)
        print(f"| {options.shape} | {cell} | {describe(steps)} |", flush=True)
    if options.resident:
        del loaded, routing
        gc.collect()
        time_resident(source, device, options.tokens)


def measure(source: ModelSource, loaded: LoadedModel, cell: str, warm: int, tokens: int) -> list[Step]:
    """Decode steps of a reply behind another that has filled the cache."""
    cache, policy, executor = cell.split(":")
    with Engine.open(
        source,
        cache=ExpertBudget.parse(cache),
        device="cuda",
        dtype="bfloat16",
        policy=policy,
        loaded=loaded,
        executor=executor,
    ) as engine:
        for count in (warm, tokens):
            settings = GenerationSettings(max_new_tokens=count, ignore_eos=True)
            steps = list(engine.generate([PROMPT], settings))
    return [step for step in steps if step.phase == "decode"][SETTLING:]


def describe(steps: list[Step]) -> str:
    traffic = sum((step.traffic for step in steps), Traffic())
    in_place, copied = (count / len(steps) / 1e6 for count in (traffic.bytes_on_demand, traffic.bytes_prefetched))
    link = (in_place + copied) * 1e6 / LINK_BANDWIDTH * 1e3
    return f"{show_times(steps)} | {traffic.hit_rate:.3f} | {in_place:.0f} | {copied:.0f} | {link:.1f}"


def show_times(steps: Iterable[Step]) -> str:
    times = sorted(step.seconds * 1e3 for step in steps)
    last = times[int(0.99 * len(times))]
    return f"{statistics.mean(times):.2f} | {statistics.median(times):.2f} | {last:.2f}"


def time_resident(source: ModelSource, device: torch.device, tokens: int) -> None:
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = model_class(source.config)(source.config).eval()
    torch.set_default_dtype(torch.float32)
    resident = ResidentModel(source, model, device)
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        resident.use(implementation)
        steps = list(resident.generate([PROMPT], GenerationSettings(max_new_tokens=tokens, ignore_eos=True)))
        print(f"| transformers | {implementation} | {show_times(steps[SETTLING:])} | | | | |", flush=True)


if __name__ == "__main__":
    main()

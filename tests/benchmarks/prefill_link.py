"""How full the link is in prefills, what they move, and what they leave for decoding; with and without streaming.

    python -m tests.benchmarks.prefill_link --dataset ../shared/prompts/lmsys_like.jsonl --hardware h200/qwen1.5 \
        h200/mixtral --models ../shared/models/mini-qwen1.5-moe ../shared/models/mini-mixtral-8x7b

A trained model of the same L, J and K answers prompts of ``--prompt-tokens``; its routing is replayed with the sizes
and times of the real model on the machine of the preset, under the virtual clock. busy: share of the prefills' time in
which something crosses the link. ratio: TTFT over the time that the bytes moved take at full bandwidth. least: experts
moved over those that were needed and not there when the prefill began. hit: of the decode steps that follow.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from engine.benchmarking import answer_prompts, make_workload
from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.hardware import Hardware, preset
from engine.policies import Offers, PreparedPolicy
from engine.policy_names import PolicyFactory
from engine.prompts import open_prompts
from engine.replay import Replay
from engine.source import resolve_model
from engine.trace_files import TraceWriter, read_trace
from engine.traces import RoutingTrace, TracedRequest, TraceManifest


@dataclass(eq=False)
class Watched:
    """A policy that notes what each prefill needs and does not find."""

    policy: PreparedPolicy
    experts: int
    replay: Replay | None = None
    missing: int = 0
    per_layer: bool = field(init=False)

    def __post_init__(self) -> None:
        self.rule, self.per_layer = self.policy.rule, self.policy.per_layer

    def begin_request(self, request: TracedRequest, position: int) -> None:
        assert self.replay is not None
        needed = {key for layer in request.keys(self.experts)[0] for key in layer}
        self.missing += len(needed.difference(self.replay._residents.keys()))
        self.policy.begin_request(request, position)

    def begin_iteration(self, iteration: int) -> Offers:
        return self.policy.begin_iteration(iteration)

    def observe(self, iteration: int, layer: int) -> Offers:
        return self.policy.observe(iteration, layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--hardware", nargs="+", required=True, help="a preset for each model")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--requests", type=int, default=8, help="requests replayed; as many fill the policies' store")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=17, help="the first comes from the prefill")
    parser.add_argument("--cache", nargs="+", default=["10%", "25%", "50%"])
    parser.add_argument("--policies", nargs="+", default=["lru", "lfu", "finemoe", "adaptive"])
    options = parser.parse_args()
    print("| model | cache | policy | prefill | busy | TTFT ms | bytes/bandwidth ms | ratio | experts | least | hit |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for model, hardware in zip(options.models, options.hardware, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            trace = record(model, options, Path(folder) / "routing.parquet")
        store = RoutingTrace(trace.manifest, trace.requests[: options.requests])
        test = RoutingTrace(trace.manifest, trace.requests[options.requests :])
        for cache in options.cache:
            capacity = ExpertBudget.parse(cache).resolve(trace.manifest.keys, None)
            for policy in options.policies:
                factory = PolicyFactory(store, test, 3, 1000, preset(hardware))
                with patch("engine.replay.open_stream", lambda *shape: None):
                    before = measure(test, factory.build(policy, capacity), preset(hardware), capacity)
                after = measure(test, factory.build(policy, capacity), preset(hardware), capacity)
                for name, figures in (("plain", before), ("streamed", after)):
                    print(f"| {Path(model).name} | {cache} | {policy} | {name} | {figures} |", flush=True)


def record(model: str, options: argparse.Namespace, path: Path) -> RoutingTrace:
    source = resolve_model(model)
    conversations = list(open_prompts(options.dataset, limit=2 * options.requests, seed=0))
    manifest = TraceManifest.of_recording(source.name, source.fingerprint, "a benchmark", gate_inputs=True)
    with (
        TraceWriter(path, manifest) as writer,
        Engine.open(source, cache=ExpertBudget.parse("100%"), device="cpu", trace=writer) as engine,
    ):
        prompts = [engine.encode_text(conversation.prompts()[0][-1].content) for conversation in conversations]
        work = make_workload((), prompts, options.prompt_tokens, options.new_tokens, engine.context_length)
        answer_prompts(engine, work.tests, options.new_tokens, between=lambda: None)
    return read_trace(path)


def measure(trace: RoutingTrace, policy: PreparedPolicy, hardware: Hardware, capacity: int) -> str:
    watched = Watched(policy, trace.manifest.experts)
    watched.replay = Replay(trace, watched, hardware, capacity, in_place=False)
    outcome = watched.replay.run(warm_up=0)
    prefill = outcome.prefill
    assert prefill is not None
    moved = prefill.bytes_moved / hardware.expert_bytes
    carrying = prefill.bytes_moved / hardware.bandwidth
    return " | ".join(
        (
            f"{moved * hardware.copy_seconds / prefill.seconds:.1%}",
            f"{prefill.tpot_seconds * 1e3:.1f}",
            f"{carrying / prefill.iterations * 1e3:.1f}",
            f"{prefill.seconds / carrying:.3f}",
            f"{moved / prefill.iterations:.1f}",
            f"{moved / watched.missing:.3f}",
            f"{outcome.hit:.3f}",
        )
    )


if __name__ == "__main__":
    main()

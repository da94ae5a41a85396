"""Decode speed beside transformers eager in the same process, and what the bookkeeping costs.

    python -m tests.benchmarks.decode_speed --models demo --caches 100% 25%

The engine and the reference take turns over the same tokens, so that a change of the machine's speed hits both;
medians are over rounds. "Bookkeeping" is the share of its CPU time that the token loop's thread spends on publishing
gates, counting, pinning and queueing; searching runs in the matcher's thread and is shown as milliseconds an iteration.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.matcher import Matcher
from engine.observer import GateObserver
from engine.source import resolve_model
from engine.steps import GenerationSettings
from engine.transfers import TransferEngine
from store.index import ResidentIndex
from tests.engine.reference import load_reference

PROMPT = "Tell me about the history of bridges and the people who built them."


class Stopwatch:
    """CPU seconds of chosen methods while it is attached; none of them calls another, so nothing counts twice."""

    def __init__(self, *methods: tuple[type, str]) -> None:
        self.seconds = 0.0
        self._methods = [(owner, name, getattr(owner, name)) for owner, name in methods]

    def __enter__(self) -> Stopwatch:
        for owner, name, original in self._methods:
            setattr(owner, name, self._timed(original))
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, original in self._methods:
            setattr(owner, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return original(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - start

        return timed


def share_of_bookkeeping(engine: Engine, ids: Sequence[int], tokens: int) -> tuple[float, float]:
    """(bookkeeping over all CPU time of the loop's thread, CPU milliseconds of search and publishing an iteration)."""
    loop = [(TransferEngine, name) for name in ("_plan", "_claim", "_leave", "_resume")]
    loop += [(GateObserver, name) for name in ("decide", "begin", "_on_embedding")]
    with Stopwatch(*loop) as books, Stopwatch((Matcher, "begin"), (Matcher, "observe"), (Matcher, "record")) as search:
        start = time.thread_time()
        engine_decode_ms(engine, ids, tokens)
        seconds = time.thread_time() - start
        engine.drain()
    return books.seconds / seconds, search.seconds / (tokens + 1) * 1e3


def reference_decode_ms(model: PreTrainedModel, ids: Sequence[int], tokens: int) -> float:
    """Milliseconds a token of a bare greedy loop over transformers' forward; no generate() overhead."""
    device = model.device
    with torch.inference_mode():
        output = model(torch.tensor([ids], device=device), use_cache=True, logits_to_keep=1)
        name = "cache" if "cache" in output else "past_key_values"
        start = time.perf_counter()
        for _ in range(tokens):
            token = output.logits[:, -1].argmax(-1).tolist()
            output = model(
                torch.tensor([token], device=device), use_cache=True, logits_to_keep=1, **{name: output[name]}
            )
        output.logits[:, -1].argmax(-1).tolist()
        return (time.perf_counter() - start) / tokens * 1e3


def engine_decode_ms(engine: Engine, ids: Sequence[int], tokens: int) -> float:
    settings = GenerationSettings(max_new_tokens=tokens + 1, ignore_eos=True)
    steps = list(engine.generate([ids], settings))
    return sum(step.seconds for step in steps[1:]) / tokens * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["demo"])
    parser.add_argument("--caches", nargs="+", default=["100%", "25%"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--implementations", nargs="+", default=["eager"])
    arguments = parser.parse_args()
    for model in arguments.models:
        source = resolve_model(model)
        shape = source.fingerprint
        reference = load_reference(source.folder, torch.bfloat16, arguments.device)
        for cache in arguments.caches:
            rows: dict[str, list[float]] = {}
            library = ResidentIndex(shape.layers, shape.experts, shape.hidden_size, capacity=1000, distance=3)
            budget = ExpertBudget.parse(cache)
            common = {"cache": budget, "device": arguments.device, "dtype": "bfloat16"}
            with Engine.open(source, **common, library=library) as guided, Engine.open(source, **common) as plain:
                ids = plain.encode_chat([{"role": "user", "content": PROMPT}])
                for _ in range(arguments.rounds + 1):
                    for name in arguments.implementations:
                        reference.set_experts_implementation(name)
                        ms = reference_decode_ms(reference, ids, arguments.tokens)
                        rows.setdefault(f"transformers {name}", []).append(ms)
                    rows.setdefault("finemoe lru", []).append(engine_decode_ms(plain, ids, arguments.tokens))
                    rows.setdefault("finemoe maps", []).append(engine_decode_ms(guided, ids, arguments.tokens))
                    guided.drain()
                books = [share_of_bookkeeping(guided, ids, arguments.tokens) for _ in range(arguments.rounds)]
            first = statistics.median(rows[f"transformers {arguments.implementations[0]}"][1:])
            for name, values in rows.items():
                median = statistics.median(values[1:])  # the first round warms up
                print(
                    f"{source.folder.name:18} {cache:>5} {name:24} {median:8.2f} ms/token  "
                    f"[{min(values[1:]):.2f}, {max(values[1:]):.2f}]  speed x{first / median:.2f}",
                    flush=True,
                )
            share, search = (statistics.median(column) for column in zip(*books, strict=True))
            print(
                f"{source.folder.name:18} {cache:>5} bookkeeping {share:.1%} of the loop thread's CPU time; "
                f"search and publishing {search:.2f} ms an iteration beside it, {len(library)} maps",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Compare offloaded generation with transformers eager over models, budgets, prompt lengths and batches.

    python -m tests.benchmarks.lossless --new-tokens 64 --device cpu

Prints one line a case and ends with the largest logit difference seen; exits 1 if any is not zero.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.source import ModelSource, resolve_model
from store.index import ResidentIndex
from tests.engine.reference import MINIS, SHARED, engine_answer, load_reference, reference_answer

TEXT = "The river bends where the old mill stood; people came from every village with carts, dogs and gossip. "


def compare(source: ModelSource, dtype: str, device: str, new_tokens: int) -> tuple[float, int, int]:
    """Largest logit difference, sequences with other ids, and cases of one model and precision."""
    shape = source.fingerprint
    reference = load_reference(source.folder, getattr(torch, dtype), device)
    library = ResidentIndex(shape.layers, shape.experts, shape.hidden_size, capacity=1000, distance=3)
    worst, wrong, cases = 0.0, 0, 0
    expected = {}
    for cache in (None, "10%", "25%", "100%"):
        start = time.perf_counter()
        with open_engine(source, cache, dtype, device, library) as engine:
            ids = engine.encode_text(TEXT * 40)
            prompts = [[ids[:n]] for n in (1, 40, 300)]
            prompts += [group * 4 for group in prompts[:1]]
            prompts.append([ids[skip : skip + n] for skip, n in enumerate((1, 40, 300, 40))])
            pad = engine.tokenizer.pad_token_id
            for number, batch in enumerate(prompts):
                if number not in expected:
                    expected[number] = reference_answer(reference, batch, new_tokens, pad)
                answer = engine_answer(engine, batch, new_tokens)
                worst = max(worst, (answer.logits - expected[number].logits).abs().max().item())
                wrong += sum(a != b for a, b in zip(answer.ids, expected[number].ids, strict=True))
                cases += 1
            engine.drain()
            seconds = time.perf_counter() - start
            print(
                f"{source.folder.name:20} {dtype:8} {engine.slots:5} slots  worst {worst}  {seconds:.0f} s", flush=True
            )
    return worst, wrong, cases


def open_engine(source: ModelSource, cache: str | None, dtype: str, device: str, library: ResidentIndex) -> Engine:
    """``cache`` None is the smallest budget of interest: one layer's K experts and one more."""
    if cache is None:
        with Engine.open(source, cache=ExpertBudget.parse("100%"), device="cpu", dtype=dtype) as whole:
            cache = str((source.fingerprint.top_k + 1) * whole.expert_bytes)
    return Engine.open(source, cache=ExpertBudget.parse(cache), device=device, dtype=dtype, library=library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["demo", *(str(SHARED / "models" / name) for name in MINIS)])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    worst, wrong, cases = 0.0, 0, 0
    for model in arguments.models:
        for dtype in arguments.dtypes:
            found = compare(resolve_model(model), dtype, arguments.device, arguments.new_tokens)
            worst, wrong, cases = max(worst, found[0]), wrong + found[1], cases + found[2]
    print(
        f"{cases} cases of {arguments.new_tokens} tokens: max abs logit difference {worst}, {wrong} differing sequences"
    )
    sys.exit(1 if worst or wrong else 0)


if __name__ == "__main__":
    main()

"""Offloaded generation equals transformers eager bit for bit: logits, and so tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.budget import ExpertBudget
from engine.engine import Engine
from engine.source import ModelSource, resolve_model
from store.index import ResidentIndex
from tests.engine.reference import (
    MINIS,
    SHARED,
    Answer,
    assert_identical,
    engine_answer,
    load_reference,
    reference_answer,
)
from tests.engine.tiny_models import TINY_FAMILIES, build_tiny_model

TEXT = "The river bends where the old mill stood; people came from every village with carts, dogs and gossip. "
# Of a whole batch, which decodes what its prompts would alone; a single prompt needs few to show a wrong prefill.
NEW_TOKENS = {"demo": 64, **dict.fromkeys(MINIS, 8)}
ALONE = 4


def prompt_ids(source: ModelSource, engine: Engine, count: int, skip: int = 0) -> list[int]:
    ids = engine.encode_text(TEXT * 40)
    assert len(ids) >= skip + count
    return ids[skip : skip + count]


def library_for(source: ModelSource) -> ResidentIndex:
    shape = source.fingerprint
    return ResidentIndex(shape.layers, shape.experts, shape.hidden_size, capacity=200, distance=3)


def budgets(engine_bytes: int, source: ModelSource) -> Iterator[str]:
    yield str(engine_bytes * (source.fingerprint.top_k + 1))
    yield from ("10%", "25%", "100%")


@pytest.fixture(scope="module", params=list(itertools.product(("demo", *MINIS), ("float32", "bfloat16"))), ids=str)
def case(request: pytest.FixtureRequest) -> tuple[ModelSource, str, PreTrainedModel]:
    name, dtype = request.param
    if name != "demo" and not (SHARED / "models" / name).is_dir():
        pytest.skip("the folder of trained miniatures is not here")
    source = resolve_model("demo" if name == "demo" else str(SHARED / "models" / name))
    return source, dtype, load_reference(source.folder, getattr(torch, dtype))


def test_every_budget_prompt_and_batch(case: tuple[ModelSource, str, PreTrainedModel]) -> None:
    source, dtype, reference = case
    longest = NEW_TOKENS[source.folder.name if source.name != "demo" else "demo"]
    expected: dict[int, Answer] = {}
    with Engine.open(source, cache=ExpertBudget.parse("100%"), device="cpu", dtype=dtype) as engine:
        batches = [[prompt_ids(source, engine, n)] for n in (1, 40, 300)]
        batches.append([prompt_ids(source, engine, n, skip) for skip, n in enumerate((1, 40, 300, 40))])
        new_tokens = [ALONE if len(prompts) == 1 else longest for prompts in batches]
        pad = engine.tokenizer.pad_token_id
        for number, prompts in enumerate(batches):
            expected[number] = reference_answer(reference, prompts, new_tokens[number], pad)
        expert_bytes = engine.expert_bytes
    for budget, library in zip(budgets(expert_bytes, source), itertools.cycle([library_for(source), None])):
        cache = ExpertBudget.parse(budget)
        with Engine.open(source, cache=cache, device="cpu", dtype=dtype, library=library) as engine:
            for number, prompts in enumerate(batches):
                assert_identical(engine_answer(engine, prompts, new_tokens[number]), expected[number])
            engine.drain()


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_families_of_the_experts_interface(family: str, tmp_path: Path) -> None:
    source = resolve_model(str(build_tiny_model(family, tmp_path / family)))
    for dtype in ("float32", "bfloat16"):
        reference = load_reference(source.folder, getattr(torch, dtype))
        library = library_for(source)
        for cache in ("40%", "100%"):
            budget = ExpertBudget.parse(cache)
            with Engine.open(source, cache=budget, device="cpu", dtype=dtype, library=library) as engine:
                prompts = [[5, 9, 7, 3, 11, 13, 6], [4, 8, 12]]
                for batch in (prompts[:1], prompts):
                    expected = reference_answer(reference, batch, 6, pad_id=engine.tokenizer.pad_token_id or 0)
                    assert_identical(engine_answer(engine, batch, 6), expected)
                engine.drain()
        assert len(library) > 0

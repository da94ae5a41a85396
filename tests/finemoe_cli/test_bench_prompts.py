from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.budget import ExpertBudget
from engine.checkpoint import load_tokenizer
from engine.decoding import ExecutorChoice
from engine.errors import UsageError
from engine.generation import hash_prompt
from engine.prompts import open_prompts
from engine.source import resolve_model
from finemoe_cli.bench_plan import BenchPlan, state_named
from finemoe_cli.bench_prompts import draw_prompts

PLAN = BenchPlan(
    policies=("finemoe", "lru", "moe-infinity", "finemoe"),
    states=(state_named("cold"), state_named("online")),
    executors=(ExecutorChoice.HOST,),
    caches=(ExpertBudget.parse("10%"), ExpertBudget.parse("25%")),
    prompt_lengths=(None, 20),
    new_tokens=(4, 8),
    repetitions=1,
    store_prompts=5,
    test_prompts=3,
    distance=None,
)


def test_every_policy_is_measured_once_in_each_of_its_states() -> None:
    cells = [(cell.policy, cell.state.name if cell.state else None) for cell in PLAN.cells[: len(PLAN.cells) // 2]]
    assert cells == [
        ("lru", None),
        ("finemoe", "cold"),
        ("finemoe", "online"),
        ("moe-infinity", "warm"),
        ("oracle", None),
        ("perfect", None),
    ]
    assert [cell.cache.text for cell in PLAN.cells] == ["10%"] * 6 + ["25%"] * 6
    assert PLAN.needs_maps and PLAN.needs_history
    assert not replace(PLAN, policies=("lfu",)).needs_history
    assert not replace(PLAN, states=(state_named("fresh"),)).needs_maps


def test_sides_share_no_prompt_and_every_length_is_built() -> None:
    tokenizer = load_tokenizer(resolve_model("demo"))
    prompts = open_prompts("demo")
    drawn = draw_prompts(prompts, PLAN, tokenizer, 2048, frozenset())
    shapes = [(workload.prompt_length, workload.new_tokens) for workload in drawn.workloads]
    assert shapes == [(None, 4), (None, 8), (20, 4), (20, 8)]
    whole = drawn.workloads[0]
    assert len(drawn.store) == 5 and len(whole.tests) == 3
    assert not {*drawn.store} & {*whole.tests}
    assert set(whole.warm_up) <= set(drawn.store)
    assert {len(prompt) for prompt in drawn.workloads[2].prompts} == {20}
    assert prompts.identity in drawn.dataset


def test_prompts_that_a_store_has_seen_are_no_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(resolve_model("demo"))
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"Tell me about {n}.\n" for n in range(30)))
    everything = replace(PLAN, store_prompts=99, test_prompts=99)
    drawn = draw_prompts(open_prompts(str(file)), everything, tokenizer, 2048, frozenset())
    tests = drawn.workloads[0].tests
    seen = {hash_prompt(ids) for ids in tests[:-1]}
    left = draw_prompts(open_prompts(str(file)), PLAN, tokenizer, 2048, seen)
    assert left.workloads[0].tests == tests[-1:]
    assert f"{len(tests) - 1} of {len(tests)} test prompts are in the store already" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the store has seen them all"):
        draw_prompts(open_prompts(str(file)), PLAN, tokenizer, 2048, seen | {hash_prompt(tests[-1])})

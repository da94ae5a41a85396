"""The prompts of a live bench: drawn, split in two sides, encoded, and brought to the lengths asked for."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from engine.benchmarking import Workload, make_workload
from engine.chat_template import encode_chat
from engine.errors import UsageError
from engine.generation import hash_prompt
from engine.prompt_split import Prompt, split_prompts
from engine.prompts import PromptSet
from finemoe_cli.bench_plan import BenchPlan
from finemoe_cli.console import note

_WARM_UP = 1
"""Prompts of the store's side that precede the tests of every repetition, unmeasured."""


@dataclass(frozen=True, slots=True)
class BenchPrompts:
    """Both sides as token ids.

    Attributes:
        dataset: name and identity of the prompt set.
        store: prompts that fill a temporary store.
        workloads: the tests at every length, with the warm-up prompts.
    """

    dataset: str
    store: tuple[tuple[int, ...], ...]
    workloads: tuple[Workload, ...]


def draw_prompts(
    prompts: PromptSet,
    plan: BenchPlan,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int | None,
    seen: Set[str],
) -> BenchPrompts:
    """Draw what a plan asks for.

    Args:
        seen: hashes of prompts that a store knows already; they are no tests.

    Raises:
        UsageError: a length is beyond the model's context, or a side has no prompt.
        DatasetError: the prompts cannot be read.
    """
    for length in plan.prompt_lengths:
        for new_tokens in plan.new_tokens:
            # Refused before the prompts are read, which may take a while.
            make_workload([], [], length, new_tokens, context_length)
    room = None if context_length is None else context_length - max(plan.new_tokens)

    def encode(prompt: Prompt) -> tuple[int, ...]:
        ids = encode_chat(tokenizer, [message.to_dict() for message in prompt])
        return tuple(ids if room is None else ids[-room:])

    # A store that has seen the set before may know any of the tests: draw them all to have enough that are new.
    split = split_prompts(prompts, plan.store_prompts, None if seen else plan.test_prompts)
    store, tests = ([encode(prompt) for prompt in side] for side in (split.store, split.tests))
    new = [ids for ids in tests if hash_prompt(ids) not in seen]
    if len(new) < len(tests):
        note(f"{len(tests) - len(new)} of {len(tests)} test prompts are in the store already and left out")
    if not new or not store:
        side = "test" if store else "store"
        more = "the store has seen them all; fill it from other prompts" if tests and store else "give more prompts"
        raise UsageError(f"{prompts.name} has no prompt for the {side} side of the 70/30 split: {more}")
    tests = new[: plan.test_prompts]
    if len(tests) < plan.test_prompts:
        note(f"{prompts.name} has {len(tests)} test prompts, not {plan.test_prompts}")
    workloads = tuple(
        make_workload(store[:_WARM_UP], tests, length, new_tokens, context_length)
        for length in plan.prompt_lengths
        for new_tokens in plan.new_tokens
    )
    return BenchPrompts(f"{prompts.name} {prompts.identity}", tuple(store), workloads)

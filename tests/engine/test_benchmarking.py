from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.benchmarking import BenchLibrary, make_workload
from engine.errors import UsageError
from engine.prompt_formats import Message
from engine.prompt_split import STORE_SHARE, split_prompts
from engine.prompts import Conversation, open_prompts
from engine.records import IterationRecord
from store.index import ResidentIndex


def conversation(position: int, *texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(tuple(Message(roles[i % 2], text) for i, text in enumerate(texts)), position)


@given(st.lists(st.text(min_size=1, max_size=8), max_size=60), st.integers(0, 20), st.integers(0, 20))
def test_no_prompt_is_on_both_sides_or_twice_on_one(texts: list[str], most_store: int, most_tests: int) -> None:
    split = split_prompts((conversation(i, text) for i, text in enumerate(texts)), most_store, most_tests)
    assert len(split.store) <= most_store and len(split.tests) <= most_tests
    assert len({*split.store, *split.tests}) == len(split.store) + len(split.tests)


def test_a_prompts_side_depends_on_its_text_alone() -> None:
    prompts = list(open_prompts("demo"))
    whole = split_prompts(prompts, 1000, None)
    share = len(whole.store) / (len(whole.store) + len(whole.tests))
    assert share == pytest.approx(STORE_SHARE, abs=0.08)
    part = split_prompts(reversed(prompts[::2]), 1000, None)
    assert set(part.store) <= set(whole.store)
    assert set(part.tests) <= set(whole.tests)


def test_later_turns_are_no_prompts() -> None:
    split = split_prompts([conversation(0, "One?", "Two.", "Three?")], 9, 9)
    (prompt,) = split.store + split.tests
    assert [message.content for message in prompt] == ["One?"]


def test_reading_ends_when_both_sides_are_full() -> None:
    def endless() -> Sequence[Conversation]:
        for number in range(10_000):
            if number > 200:
                pytest.fail("read on")
            yield conversation(number, f"Prompt {number}")

    split = split_prompts(endless(), 5, 5)
    assert (len(split.store), len(split.tests)) == (5, 5)


sides = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=5)


@given(sides, sides, st.integers(1, 40), st.integers(1, 5))
def test_prompts_are_cut_or_built_to_length(
    warm_up: list[list[int]], tests: list[list[int]], length: int, new_tokens: int
) -> None:
    workload = make_workload(warm_up, tests, length, new_tokens, 100)
    assert {len(prompt) for prompt in workload.prompts} == {length}
    for made, prompt in zip(workload.tests, tests, strict=True):
        assert list(made[-min(length, len(prompt)) :]) == prompt[-length:]
        assert set(made) <= {token for other in tests for token in other}


def test_prompts_as_they_are_lose_only_what_the_context_has_no_room_for() -> None:
    workload = make_workload([], [[1, 2, 3], [4]], None, 3, 5)
    assert workload.tests == ((2, 3), (4,))
    with pytest.raises(UsageError, match="more than the model's context of 5"):
        make_workload([], [], 3, 3, 5)


def test_a_library_learns_only_when_told_to() -> None:
    index = ResidentIndex(layers=2, experts=4, hidden_size=3)
    library = BenchLibrary(index)
    record = IterationRecord(0, 0, "prefill", "", 1, np.ones(3, np.float32), np.full((2, 4), 0.25, np.float32))
    library.publish([record])
    assert len(library) == 0
    library.learning = True
    library.publish([record])
    assert len(library) == len(index) == 1
    assert library.semantic_scores(np.ones((1, 3), np.float32)) == pytest.approx(1.0, abs=1e-3)
    assert library.start_trajectory(1).observe(np.full((1, 4), 0.25, np.float32)) == pytest.approx(1.0, abs=1e-3)
    assert library.probabilities(0) == pytest.approx(0.25)

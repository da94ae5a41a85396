"""Two sides of a prompt set that share no prompt: one fills a store, the other is measured on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from engine.prompt_formats import Message
from engine.prompts import Conversation

STORE_SHARE = 0.7
"""The paper's split: 70 % of the prompts fill the store, the others are tests."""

Prompt = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """Prompts of either side, each once, in the order of the set."""

    store: tuple[Prompt, ...]
    tests: tuple[Prompt, ...]


def split_prompts(conversations: Iterable[Conversation], most_store: int, most_tests: int | None) -> PromptSplit:
    """Draw prompts for both sides, reading no further than both are full.

    A prompt is what a conversation opens with, up to its first user turn: later turns repeat the earlier ones, so
    that a conversation would meet itself. Which side a prompt is on depends on its text alone.

    Args:
        most_store: prompts of the store's side at most.
        most_tests: tests at most; None for all that the set has.
    """
    store: dict[str, Prompt] = {}
    tests: dict[str, Prompt] = {}
    for conversation in conversations:
        prompt = conversation.prompts()[0]
        digest = _digest(prompt)
        side = store if _share(digest) < STORE_SHARE else tests
        most = most_store if side is store else most_tests
        if most is None or len(side) < most:
            side[digest] = prompt
        if len(store) == most_store and len(tests) == most_tests:
            break
    return PromptSplit(tuple(store.values()), tuple(tests.values()))


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(json.dumps([message.to_dict() for message in prompt]).encode()).hexdigest()


def _share(digest: str) -> float:
    """The hash as a number in [0, 1)."""
    return int(digest[:12], 16) / 16**12

"""What a live benchmark asks of a model: prompts of given lengths, passes over them, a store in a given state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.errors import UsageError
from engine.records import ExpertMapLibrary, IterationRecord, TrajectoryScan
from engine.steps import GenerationSettings, Step


class Generating(Protocol):
    """An engine, or anything else that answers prompts step by step."""

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: GenerationSettings
    ) -> Generator[Step, None, None]: ...

    def drain(self) -> None:
        """Wait until everything that runs beside the token loop is done with the iterations so far."""
        ...


@dataclass(frozen=True, slots=True)
class StoreState:
    """What a policy's store holds when a repetition begins, and whether the prompts measured are added to it."""

    name: str
    filled: bool
    learning: bool


STORE_STATES = (
    StoreState("cold", filled=False, learning=False),
    StoreState("fresh", filled=False, learning=True),
    StoreState("warm", filled=True, learning=False),
    StoreState("online", filled=True, learning=True),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one shape, each answered by itself.

    Attributes:
        prompt_length: tokens of every prompt; None where prompts are taken as they are.
        new_tokens: tokens generated for each, end-of-turn tokens passed over.
        warm_up: token ids of prompts that are answered first and not measured.
        tests: token ids of those that are.
    """

    prompt_length: int | None
    new_tokens: int
    warm_up: tuple[tuple[int, ...], ...]
    tests: tuple[tuple[int, ...], ...]

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return self.warm_up + self.tests


def make_workload(
    warm_up: Sequence[Sequence[int]],
    tests: Sequence[Sequence[int]],
    prompt_length: int | None,
    new_tokens: int,
    context_length: int | None,
) -> Workload:
    """Bring prompts to a length, each side's out of its own prompts.

    Raises:
        UsageError: prompt and answer together are longer than the model's context.
    """
    wanted = (prompt_length or 1) + new_tokens
    if context_length is not None and wanted > context_length:
        raise UsageError(
            f"{prompt_length or 1} prompt and {new_tokens} new tokens are more than the model's context of "
            f"{context_length:,}: give smaller -p or -n"
        )
    room = None if context_length is None else context_length - new_tokens
    sides = (tuple(_fit(side, place, prompt_length, room) for place in range(len(side))) for side in (warm_up, tests))
    return Workload(prompt_length, new_tokens, *sides)


def _fit(prompts: Sequence[Sequence[int]], place: int, length: int | None, room: int | None) -> tuple[int, ...]:
    """The end of a prompt; where it is too short, the prompts before it, in a circle, stand in front of it.

    The end holds the newest turn and what opens the answer, so a cut prompt still asks something.
    """
    ids = list(prompts[place])
    if length is None:
        return tuple(ids if room is None else ids[-room:])
    while len(ids) < length:
        place -= 1
        ids = [*prompts[place % len(prompts)], *ids]
    return tuple(ids[-length:])


def answer_prompts(
    model: Generating, prompts: Sequence[Sequence[int]], new_tokens: int, between: Callable[[], None]
) -> list[list[Step]]:
    """Answer prompts one after the other, greedily and to the full length; the steps of each.

    ``between`` is called after every step, where it may raise to stop. The engine is idle when a request begins, as
    it is for a user who reads an answer before he asks again.
    """
    settings = GenerationSettings(max_new_tokens=new_tokens, ignore_eos=True)
    requests = []
    for prompt in prompts:
        steps: list[Step] = []
        with closing(model.generate([prompt], settings)) as generation:
            for step in generation:
                steps.append(step)
                between()
        model.drain()
        requests.append(steps)
    return requests


def tokens_of(requests: Sequence[Sequence[Step]]) -> list[list[int | None]]:
    """The generated token ids of single-sequence requests."""
    return [[step.token_ids[0] for step in steps] for steps in requests]


class BenchLibrary:
    """A library that takes iterations only while ``learning`` is set; implements ``ExpertMapLibrary``."""

    def __init__(self, library: ExpertMapLibrary) -> None:
        self._library = library
        self.learning = False

    def __len__(self) -> int:
        return len(self._library)

    def semantic_scores(self, embeddings: np.ndarray) -> np.ndarray:
        return self._library.semantic_scores(embeddings)

    def start_trajectory(self, batch: int) -> TrajectoryScan:
        return self._library.start_trajectory(batch)

    def probabilities(self, row: int) -> np.ndarray:
        return self._library.probabilities(row)

    def publish(
        self,
        records: Sequence[IterationRecord],
        semantic_scores: np.ndarray | None = None,
        trajectory_scores: np.ndarray | None = None,
    ) -> None:
        if self.learning:
            self._library.publish(records, semantic_scores, trajectory_scores)

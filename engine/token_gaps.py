"""How far eager's two best logits lie apart, which tells a difference of rounding from a wrong token."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from engine.benchmarking import Generating
from engine.steps import GenerationSettings, Step


class GapMeter:
    """Passes a model's steps on and keeps, of each, the gap between its two best logits; implements ``Generating``.

    Steps take no longer: their logits come to the host once they have been timed.

    Attributes:
        gaps: float, a list a request and in it one a token.
    """

    def __init__(self, model: Generating) -> None:
        self._model = model
        self.gaps: list[list[float]] = []

    def generate(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> Generator[Step, None, None]:
        """Answer one prompt; see ``TokenLoop.generate``."""
        gaps: list[float] = []
        self.gaps.append(gaps)
        with closing(self._model.generate(prompts, replace(settings, keep_logits=True))) as steps:
            for step in steps:
                assert step.logits is not None
                first, second = torch.topk(step.logits[0], 2).values.tolist()
                gaps.append(first - second)
                yield replace(step, logits=None)

    def drain(self) -> None:
        self._model.drain()


@dataclass(frozen=True, slots=True)
class Difference:
    """Where answers part from the expected ones, for good: what follows has another past.

    Attributes:
        prompts: how many of the answers do.
        prompt, token: place of the first differing token of the answer whose gap is widest, counted from 0.
        gap: between the two best logits of the expected answer there; None where they are not known.
    """

    prompts: int
    prompt: int
    token: int
    gap: float | None

    @classmethod
    def between(
        cls,
        tokens: Sequence[Sequence[int | None]],
        expected: Sequence[Sequence[int | None]],
        gaps: Sequence[Sequence[float]] | None,
    ) -> Difference | None:
        """None where both are equal; ``gaps`` are of the expected tokens."""
        places = [
            (prompt, next(t for t, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]))
            for prompt, (mine, other) in enumerate(zip(tokens, expected, strict=True))
            if list(mine) != list(other)
        ]
        if not places:
            return None
        if gaps is None:
            return cls(len(places), *places[0], None)
        gap, (prompt, token) = max((gaps[prompt][token], (prompt, token)) for prompt, token in places)
        return cls(len(places), prompt, token, gap)

"""The loop of ``finemoe warm``: prompts through the engine in batches, maps to the store in large commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import PromptError
from finemoe_cli.interrupts import Interruptible

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.prompts import Conversation
    from engine.steps import GenerationSettings
    from store.expert_map_store import ExpertMapStore

# Smaller commits make the store slow to read; rarer ones lose more to a kill.
COMMIT_MAPS = 1000
COMMIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """One user turn to answer, with the turns before it; ``row`` is its conversation's place in the set."""

    messages: tuple[dict[str, str], ...]
    row: int


@dataclass(slots=True)
class WarmCounts:
    """How far a warm run is.

    Attributes:
        completed: prompts whose maps are safe in the store, those of earlier processes and refused ones included.
        row: conversations of the prompt set begun.
        prompts: prompts answered by this process.
        refused: prompts passed over, for the model's chat template does not take them.
        shortened: those of them that lost their beginning to the model's context.
        tokens: tokens generated for them.
        maps_kept: maps committed to the store.
        maps_replaced: maps that made room as the most redundant.
        seconds: wall time of this process's prompts and commits.
    """

    completed: int = 0
    row: int = 0
    prompts: int = 0
    refused: int = 0
    shortened: int = 0
    tokens: int = 0
    maps_kept: int = 0
    maps_replaced: int = 0
    seconds: float = 0.0

    @property
    def prompts_per_second(self) -> float:
        return self.prompts / self.seconds if self.seconds else 0.0


@dataclass
class Warming:
    """Warms one store with one engine.

    Attributes:
        counts: begin with the prompts completed by earlier processes.
        on_refusal: told of each prompt that the chat template refuses, which is then passed over; None to stop there.
    """

    engine: Engine
    maps: ExpertMapStore
    settings: GenerationSettings
    batch: int
    counts: WarmCounts
    on_refusal: Callable[[WarmPrompt, PromptError], None] | None = None

    def __post_init__(self) -> None:
        self._earlier = self.counts.completed

    def run(self, prompts: Iterable[WarmPrompt], interrupt: Interruptible) -> Generator[WarmCounts, None, None]:
        """Answer the prompts that are left, yielding the counts after every batch.

        Stops between two tokens once ``interrupt`` is requested. Whatever ends it, the maps of all batches
        that are done have been committed by then.

        Raises:
            PromptError: the chat template refuses a prompt, and ``on_refusal`` is None.
        """
        began = committed = time.monotonic()
        remaining = iter(prompts)
        try:
            while batch := self._gather(remaining):
                if not self._answer([encoded for encoded in batch if encoded is not None], interrupt):
                    return
                self.counts.refused += batch.count(None)
                if self.maps.pending >= COMMIT_MAPS or time.monotonic() - committed >= COMMIT_SECONDS:
                    self._commit()
                    committed = time.monotonic()
                self.counts.seconds = time.monotonic() - began
                yield self.counts
        finally:
            self._commit()
            self.counts.seconds = time.monotonic() - began

    def _gather(self, prompts: Iterator[WarmPrompt]) -> list[list[int] | None]:
        """Token ids of the next batch; a refused prompt is None and ends it, for sequences are numbered in a row."""
        batch: list[list[int] | None] = []
        for prompt in prompts:
            self.counts.row = prompt.row + 1
            try:
                batch.append(self._encode(prompt))
            except PromptError as error:
                if self.on_refusal is None:
                    raise
                self.on_refusal(prompt, error)
                batch.append(None)
            if len(batch) == self.batch or batch[-1] is None:
                break
        return batch

    def _answer(self, encoded: list[list[int]], interrupt: Interruptible) -> bool:
        """Generate for one batch; False if it was cut short."""
        if not encoded:
            return True
        first = self._done
        tokens = 0
        with closing(self.engine.generate(encoded, self.settings, first_sequence=first)) as steps:
            for step in steps:
                if interrupt.requested:
                    return False
                tokens += sum(token is not None for token in step.token_ids)
        self.counts.prompts += len(encoded)
        self.counts.tokens += tokens
        return True

    @property
    def _done(self) -> int:
        return self._earlier + self.counts.prompts + self.counts.refused

    def _commit(self) -> None:
        self.engine.drain()
        done = self._done
        report = self.maps.flush(completed=done)
        self.counts.completed = done
        self.counts.maps_kept += report.kept
        self.counts.maps_replaced += report.replaced

    def _encode(self, prompt: WarmPrompt) -> list[int]:
        tokens = self.engine.encode_chat(prompt.messages)
        if self.engine.context_length is None:
            return tokens
        room = self.engine.context_length - self.settings.max_new_tokens
        if len(tokens) > room:
            self.counts.shortened += 1
        return tokens[-room:]


def iterate_prompts(conversations: Iterable[Conversation]) -> Iterator[WarmPrompt]:
    """Every user turn of every conversation, in order, with the turns before it."""
    for conversation in conversations:
        for messages in conversation.prompts():
            yield WarmPrompt(tuple(message.to_dict() for message in messages), conversation.position)

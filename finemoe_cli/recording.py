"""The loop of ``finemoe bench record``: prompts through the engine, their routing into a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import TraceError, UsageError
from finemoe_cli.console import note
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.opening import describe_budget, open_engine
from finemoe_cli.settings import Settings

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.prompts import Conversation, PromptSet
    from engine.source import ModelSource
    from engine.traces import TraceManifest


@dataclass(frozen=True, slots=True)
class RecordingLimits:
    """What is recorded of a prompt set.

    Attributes:
        turns: user turns of a conversation, from its first; None for all.
        prompt_tokens: of which a longer prompt keeps the last; None for as many as the model's context has room for.
        new_tokens: of an answer at most.
        batch: prompts run together.
        teacher_force: answer with the conversation's own replies. A turn that has none is left out.
        gate_inputs: write what every gate read in decode steps, too.
    """

    turns: int | None
    prompt_tokens: int | None
    new_tokens: int
    batch: int
    teacher_force: bool
    gate_inputs: bool


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One user turn with the turns before it, and the reply that the conversation has to it."""

    messages: tuple[dict[str, str], ...]
    reply: str | None


class Recording:
    """Answers every prompt of a set behind a plain LRU cache: greedily, or as the set's own replies do.

    Attributes:
        requests: those answered whole.
    """

    def __init__(self, settings: Settings, source: ModelSource, prompts: PromptSet, limits: RecordingLimits) -> None:
        if source.context_length is not None and limits.new_tokens >= source.context_length:
            raise UsageError(
                f"--max-new-tokens {limits.new_tokens} leaves no room for a prompt in the model's context of "
                f"{source.context_length} tokens; give fewer"
            )
        self._settings = settings
        self._source = source
        self._prompts = prompts
        self._limits = limits
        self.requests = 0

    def write(self, target: Path, interrupt: Interruptible) -> int:
        """Record until the prompts or the user's patience end; return the iterations written.

        Raises:
            TraceError: the target cannot be written, or there is no prompt, or no reply to force.
            UnsupportedModelError: gate inputs of a model whose gates are no linear maps of them.
        """
        from engine.trace_files import TraceWriter

        turns = iterate_turns(self._prompts, self._limits)
        first = next(turns, None)
        if first is None:
            missing = "user turn with a reply to force" if self._limits.teacher_force else "prompt to record"
            raise TraceError(f"{self._prompts.name} has no {missing}")
        with (
            TraceWriter(target, self._manifest()) as trace,
            open_engine(self._settings, self._source, None, trace) as engine,
        ):
            note(describe_budget(engine, self._settings.cache.text))
            remaining = chain([first], turns)
            while not interrupt.requested and (group := list(islice(remaining, self._limits.batch))):
                self._answer(engine, group, interrupt)
            return trace.iterations

    def _answer(self, engine: Engine, group: list[RecordedTurn], interrupt: Interruptible) -> None:
        from engine.steps import GenerationSettings

        encoded = [self._shorten(engine.encode_chat(turn.messages), engine.context_length) for turn in group]
        replies = [self._encode_reply(engine, turn.reply) for turn in group if turn.reply is not None]
        settings = GenerationSettings(self._limits.new_tokens)
        with closing(engine.generate(encoded, settings, replies=replies or None)) as steps:
            for _ in steps:
                if interrupt.requested:
                    return
        self.requests += len(group)

    def _encode_reply(self, engine: Engine, reply: str) -> list[int]:
        return engine.tokenizer(reply, add_special_tokens=False)["input_ids"][: self._limits.new_tokens]

    def _shorten(self, tokens: list[int], context_length: int | None) -> list[int]:
        """The end of a prompt that leaves room for its answer."""
        room = [self._limits.prompt_tokens, context_length and context_length - self._limits.new_tokens]
        return tokens[-min(len(tokens), *(n for n in room if n is not None)) :]

    def _manifest(self) -> TraceManifest:
        from engine.traces import TraceManifest

        answers = "answered by its own replies" if self._limits.teacher_force else "answered greedily"
        return TraceManifest.of_recording(
            self._source.name,
            self._source.fingerprint,
            f"recorded from {self._prompts.name} {self._prompts.identity}, {answers}",
            self._limits.gate_inputs,
        )


def iterate_turns(conversations: Iterable[Conversation], limits: RecordingLimits) -> Iterator[RecordedTurn]:
    """The user turns of every conversation, in order, within the limits."""
    for conversation in conversations:
        for prompt in conversation.prompts()[: limits.turns]:
            following = conversation.messages[len(prompt) : len(prompt) + 1]
            reply = next((m.content for m in following if m.role == "assistant"), None)
            if limits.teacher_force and reply is None:
                continue
            messages = tuple(message.to_dict() for message in prompt)
            yield RecordedTurn(messages, reply if limits.teacher_force else None)

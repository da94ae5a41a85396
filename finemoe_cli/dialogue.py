"""A conversation with the model: its turns, how they become a prompt, and how a reply streams out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import PromptError
from finemoe_cli.interrupts import Interruptible

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.steps import GenerationSettings, GenerationSummary

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model.

    Attributes:
        text: what was written, without the end-of-turn token.
        token_ids: every generated token, the end-of-turn token included.
        finish_reason: "stop", "length" or "interrupted".
        filled_context: the reply ended because the model's context was full.
        summary: times in seconds and expert traffic.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    filled_context: bool
    summary: GenerationSummary


class Dialogue:
    """The turns so far. ``raw`` sends text as it is, without a chat template."""

    def __init__(self, engine: Engine, system: str | None = None, raw: bool = False) -> None:
        self._engine = engine
        self._raw = raw
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    def clear(self) -> None:
        """Forget all turns but the system text."""
        self._turns = []

    def reply(
        self,
        text: str,
        settings: GenerationSettings,
        write: Callable[[str], None],
        interrupt: Interruptible,
    ) -> Reply:
        """Answer one user turn, writing each piece of text as it comes, and remember both.

        An interrupted answer is remembered as far as it got, so that one can go on from there; where Ctrl-C came
        before the first iteration, it has no tokens.

        Raises:
            PromptError: nothing but white space, or no room for an answer in the model's context.
        """
        from engine.steps import summarize

        check_prompt(text)
        turns = [*self._turns, {"role": "user", "content": text}]
        prompt = self._encode(turns)
        wanted = replace(settings, max_new_tokens=min(settings.max_new_tokens, self._room(prompt)))

        steps = []
        finish_reason = INTERRUPTED
        with closing(self._engine.generate([prompt], wanted)) as generation:
            while not interrupt.requested and (step := next(generation, None)) is not None:
                steps.append(step)
                write(step.texts[0])
                finish_reason = step.finished[0] or INTERRUPTED
        answer = "".join(step.texts[0] for step in steps)
        self._turns = [*turns, {"role": "assistant", "content": answer}]
        return Reply(
            text=answer,
            token_ids=[step.token_ids[0] for step in steps if step.token_ids[0] is not None],
            finish_reason=finish_reason,
            filled_context=finish_reason == "length" and wanted.max_new_tokens < settings.max_new_tokens,
            summary=summarize(steps, len(prompt)),
        )

    def _room(self, prompt: list[int]) -> int:
        """How many tokens may follow; a large number where the model states no bound."""
        length = self._engine.context_length
        if length is None:
            return sys.maxsize
        if len(prompt) >= length:
            raise PromptError(
                f"the conversation has {len(prompt):,} tokens and the model's context {length:,}, an answer "
                f"included: shorten the prompt{', or /clear' if self._turns else ''}"
            )
        return length - len(prompt)

    def _encode(self, turns: list[dict[str, str]]) -> list[int]:
        if self._raw:
            return self._engine.encode_text("".join(turn["content"] for turn in turns))
        return self._engine.encode_chat([*self._opening, *turns])


def check_prompt(text: str) -> None:
    """Refuse a prompt of white space alone, and text that no tokenizer can read.

    Raises:
        PromptError: as above.
    """
    if not text.strip():
        raise PromptError("the prompt is empty; give some text with -p or on stdin")
    check_text(text, "the prompt")


def check_text(text: str, what: str) -> None:
    """Refuse text that no tokenizer can read: bytes of the command line that were no UTF-8.

    Raises:
        PromptError: as above; ``what`` names the text in it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{what} is not valid UTF-8 text at character {error.start + 1}") from error

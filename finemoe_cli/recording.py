"""The loop of ``finemoe bench record``: prompts through the engine, their routing into a trace."""

from __future__ import annotations

from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import TraceError, UsageError
from finemoe_cli.console import note
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.opening import describe_budget, open_engine
from finemoe_cli.settings import Settings
from finemoe_cli.warming import WarmPrompt, iterate_prompts

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.prompts import PromptSet
    from engine.source import ModelSource
    from engine.traces import TraceManifest


class Recording:
    """Answers every prompt of a set greedily behind a plain LRU cache. ``requests`` counts those answered whole."""

    def __init__(
        self, settings: Settings, source: ModelSource, prompts: PromptSet, max_new_tokens: int, batch: int
    ) -> None:
        if source.context_length is not None and max_new_tokens >= source.context_length:
            raise UsageError(
                f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the model's context of "
                f"{source.context_length} tokens; give fewer"
            )
        self._settings = settings
        self._source = source
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._batch = batch
        self.requests = 0

    def write(self, target: Path, interrupt: Interruptible) -> int:
        """Record until the prompts or the user's patience end; return the iterations written.

        Raises:
            TraceError: the target cannot be written, or there is no prompt.
        """
        from engine.trace_files import TraceWriter

        prompts = iterate_prompts(self._prompts)
        first = next(prompts, None)
        if first is None:
            raise TraceError(f"{self._prompts.name} has no prompt to record")
        with (
            TraceWriter(target, self._manifest()) as trace,
            open_engine(self._settings, self._source, None, trace) as engine,
        ):
            note(describe_budget(engine, self._settings.cache.text))
            remaining = chain([first], prompts)
            while not interrupt.requested and (group := list(islice(remaining, self._batch))):
                self._answer(engine, group, interrupt)
            return trace.iterations

    def _answer(self, engine: Engine, group: list[WarmPrompt], interrupt: Interruptible) -> None:
        from engine.steps import GenerationSettings

        encoded = [self._shorten(engine.encode_chat(prompt.messages), engine.context_length) for prompt in group]
        with closing(engine.generate(encoded, GenerationSettings(self._max_new_tokens))) as steps:
            for _ in steps:
                if interrupt.requested:
                    return
        self.requests += len(group)

    def _shorten(self, tokens: list[int], context_length: int | None) -> list[int]:
        """The end of a prompt that leaves room for its answer."""
        return tokens if context_length is None else tokens[-(context_length - self._max_new_tokens) :]

    def _manifest(self) -> TraceManifest:
        from engine.traces import TraceManifest

        fingerprint = self._source.fingerprint
        return TraceManifest(
            model=self._source.name,
            layers=fingerprint.layers,
            experts=fingerprint.experts,
            top_k=fingerprint.top_k,
            distributions="full",
            hidden_size=fingerprint.hidden_size,
            fingerprint=fingerprint.to_dict(),
            origin=f"recorded from {self._prompts.name} {self._prompts.identity}",
        )

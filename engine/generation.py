"""The token loop: prompts in, one ``Step`` an iteration out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.errors import PromptError
from engine.host_steps import HostSteps, IterationListener, PaddedBatch, Steps
from engine.observer import Iteration, SequenceState
from engine.sampling import Sampler, check_drawn, make_forced_sampler, make_sampler
from engine.steps import GenerationSettings, Step, Traffic
from engine.text_stream import TextStream


class TrafficMeter(Protocol):
    """Running totals of expert traffic."""

    @property
    def traffic(self) -> Traffic: ...

    def settle_stalls(self) -> None: ...


class Decoding(Protocol):
    """Another way to run decode steps than the host's."""

    def follow(self, prefill: HostSteps, new_tokens: int, sample: Sampler) -> Steps | None:
        """Steps that go on behind a prefill, for so many tokens at most; None where they have to be the host's."""
        ...

    def close(self) -> None:
        """End a reply that was left: the device runs one at a time."""
        ...


@dataclass(slots=True)
class _Sequence:
    """One prompt on its way through the batch."""

    number: int
    prompt: Sequence[int]
    prompt_hash: str
    text: TextStream
    limit: int
    iterations: int = 0
    new_ids: list[int] = field(default_factory=list)
    finished: str | None = None


class TokenLoop:
    """Runs a model's forward passes over left-padded batches and chooses tokens.

    Args:
        eos_token_ids: any of them ends a sequence.
        context_length: positions the model was made for; None where it states none.
        decoding: runs decode steps where it can; None leaves them to the host.
        prefill_chunk: tokens of each prompt that one forward pass of a prefill takes at most; None for all. Each pass
            is an iteration, and all those of a prefill are one step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        observer: IterationListener,
        meter: TrafficMeter,
        eos_token_ids: frozenset[int],
        context_length: int | None,
        device: torch.device,
        decoding: Decoding | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._observer = observer
        self._meter = meter
        self._eos = eos_token_ids
        self._context_length = context_length
        self._device = device
        self._iterations = 0
        self._sequences = 0
        self._decoding = decoding
        self._prefill_chunk = prefill_chunk
        pad = tokenizer.pad_token_id
        self._pad_id = pad if pad is not None else min(eos_token_ids, default=0)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        first_sequence: int | None = None,
        replies: Sequence[Sequence[int]] | None = None,
    ) -> Generator[Step, None, None]:
        """Yield the prefill and then every decode step; may be closed at any point.

        Args:
            first_sequence: number of the first prompt's sequence, by which a resumed run gives its records the
                names they would have had; None counts on.
            replies: the tokens each prompt is answered with (teacher forcing): they replace those the model would
                choose, and no token among them ends a sequence early.

        Raises:
            PromptError: a prompt without tokens, one that leaves no room for a new token, or one whose reply has none.
        """
        self._check(prompts)
        if replies is not None and (len(replies) != len(prompts) or not all(replies)):
            raise PromptError("teacher forcing needs a reply of at least one token for each prompt")
        sample = make_sampler(settings, self._device)
        if replies is not None:
            sample = make_forced_sampler(replies, self._device)
        if first_sequence is not None:
            self._sequences = first_sequence
        sequences = [self._admit(prompt, settings.max_new_tokens) for prompt in prompts]
        for sequence, reply in zip(sequences, replies or (), strict=bool(replies)):
            sequence.limit = min(sequence.limit, len(reply))
        eos = frozenset[int]() if settings.ignore_eos or replies is not None else self._eos
        batch = PaddedBatch(prompts, self._pad_id, self._device, self._prefill_chunk)
        prefill = HostSteps(self._model, self._observer, batch, sample)
        steps: Steps = prefill
        limit = max(s.limit for s in sequences)
        if self._decoding is not None:
            self._decoding.close()
        try:
            for index in range(limit):
                start = time.perf_counter()
                before = self._meter.traffic
                live = [s.finished is None for s in sequences]
                if index == 1 and self._decoding is not None:
                    steps = self._decoding.follow(prefill, limit - 1, sample) or prefill
                while batch.has_more:
                    prefill.feed(self._describe(sequences, batch, index))
                iteration = self._describe(sequences, batch, index)
                logits, chosen = steps.advance(iteration, follow=index + 1 < limit)
                check_drawn([token for token, alive in zip(chosen, live, strict=True) if alive])
                texts = [self._accept(s, token, eos) for s, token in zip(sequences, chosen, strict=True)]
                batch.append(
                    [t if s.finished is None else self._pad_id for t, s in zip(chosen, sequences, strict=True)]
                )
                self._meter.settle_stalls()
                yield Step(
                    iteration=index,
                    phase="prefill" if index == 0 else "decode",
                    token_ids=tuple(t if alive else None for t, alive in zip(chosen, live, strict=True)),
                    texts=tuple(texts),
                    finished=tuple(s.finished for s in sequences),
                    seconds=time.perf_counter() - start,
                    traffic=self._meter.traffic - before,
                    logits=logits.float().cpu() if settings.keep_logits else None,
                )
                if all(s.finished for s in sequences):
                    return
        finally:
            steps.close()

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        if not prompts:
            raise PromptError("there is no prompt to answer")
        for prompt in prompts:
            if not prompt:
                raise PromptError("the prompt is empty: it has no tokens")
            if self._room(len(prompt)) < 1:
                raise PromptError(
                    f"the prompt has {len(prompt):,} tokens, but the model's context holds {self._context_length:,} "
                    "with at least one left for the answer: shorten it"
                )

    def _room(self, prompt_length: int) -> int:
        return 2**31 if self._context_length is None else self._context_length - prompt_length

    def _admit(self, prompt: Sequence[int], max_new_tokens: int) -> _Sequence:
        limit = min(max_new_tokens, self._room(len(prompt)))
        self._sequences += 1
        return _Sequence(self._sequences - 1, prompt, hash_prompt(prompt), TextStream(self._tokenizer), limit)

    def _describe(self, sequences: Sequence[_Sequence], batch: PaddedBatch, index: int) -> Iteration:
        states = []
        for row, s in enumerate(sequences):
            tokens = 1 if index else batch.prompt_tokens(row)
            # A chunk may hold nothing but padding of a short prompt.
            if s.finished is None and tokens:
                states.append(SequenceState(row, s.number, s.iterations, s.prompt_hash, tokens))
                s.iterations += 1
        self._iterations += 1
        return Iteration(
            number=self._iterations - 1,
            phase="decode" if index else "prefill",
            batch=len(sequences),
            width=batch.width,
            sequences=tuple(states),
        )

    def _accept(self, sequence: _Sequence, token: int, eos: frozenset[int]) -> str:
        """Book a chosen token; return the text that became complete."""
        if sequence.finished is not None:
            return ""
        sequence.new_ids.append(token)
        if token in eos:
            sequence.finished = "stop"
            return sequence.text.finish()
        text = sequence.text.push(token)
        if len(sequence.new_ids) == sequence.limit:
            sequence.finished = "length"
            text += sequence.text.finish()
        return text


def hash_prompt(token_ids: Sequence[int]) -> str:
    """The name by which records know a prompt without holding it."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:32]

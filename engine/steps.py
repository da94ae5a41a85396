"""What one iteration of the token loop tells its caller: tokens, text, time and expert traffic."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from engine.records import Phase


@dataclass(frozen=True, slots=True)
class Traffic:
    """Expert traffic of one or more iterations. A routed expert counts once a layer and iteration.

    Attributes:
        hits: routed experts resident when their gate had decided.
        late: routed experts whose copy was under way at that moment.
        misses: routed experts that were not on their way.
        bytes_on_demand: bytes copied because a gate had already decided.
        bytes_prefetched: bytes copied ahead of a decision.
        bytes_wasted: bytes of prefetched experts evicted without having been used.
        stall_seconds: time the token loop waited for copies.
    """

    hits: int = 0
    late: int = 0
    misses: int = 0
    bytes_on_demand: int = 0
    bytes_prefetched: int = 0
    bytes_wasted: int = 0
    stall_seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def routed(self) -> int:
        return self.hits + self.late + self.misses

    @property
    def hit_rate(self) -> float:
        """Resident experts over routed ones (the paper's hit rate); 1.0 where nothing was routed."""
        return self.hits / self.routed if self.routed else 1.0


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How tokens are chosen. Temperature 0 is greedy, whatever the other settings say.

    ``ignore_eos`` goes on to ``max_new_tokens`` whatever is generated, as measurements of a given length need.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    keep_logits: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One iteration of a batch of B sequences.

    Attributes:
        iteration: 0 for the prefill.
        phase: "prefill" or "decode".
        token_ids: the new token of each sequence; None once the sequence has ended.
        texts: the text that became complete with it (a multi-byte character waits for its last token).
        finished: "stop" (an end-of-turn token), "length", or None while the sequence goes on.
        seconds: wall time of the iteration, sampling included.
        traffic: expert traffic of this iteration alone.
        logits: float [B, V] on the host if asked for.
    """

    iteration: int
    phase: Phase
    token_ids: tuple[int | None, ...]
    texts: tuple[str, ...]
    finished: tuple[str | None, ...]
    seconds: float
    traffic: Traffic
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class GenerationSummary:
    """A finished generation in the terms of serving papers; times in seconds."""

    prompt_tokens: int
    new_tokens: int
    ttft: float
    tpot: float
    tokens_per_second: float
    prefill: Traffic
    decode: Traffic


def summarize(steps: list[Step], prompt_tokens: int) -> GenerationSummary:
    """Condense the steps of one ``generate`` call.

    TTFT is the first iteration's time, TPOT the mean of the later iterations, tokens/s counts decode
    tokens of all sequences over decode time (the prefill's where nothing was decoded).
    """
    decode_steps = [step for step in steps if step.phase == "decode"]
    count = lambda chosen: sum(t is not None for step in chosen for t in step.token_ids)  # noqa: E731
    ttft = sum(step.seconds for step in steps if step.phase == "prefill")
    decode_seconds = sum(step.seconds for step in decode_steps)
    timed_tokens, seconds = (count(decode_steps), decode_seconds) if decode_steps else (count(steps), ttft)
    return GenerationSummary(
        prompt_tokens=prompt_tokens,
        new_tokens=count(steps),
        ttft=ttft,
        tpot=decode_seconds / len(decode_steps) if decode_steps else 0.0,
        tokens_per_second=timed_tokens / seconds if seconds else 0.0,
        prefill=sum((s.traffic for s in steps if s.phase == "prefill"), Traffic()),
        decode=sum((s.traffic for s in decode_steps), Traffic()),
    )

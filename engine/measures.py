"""Figures of many requests from their steps: means, deviations and percentiles, as serving papers give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.steps import Step, Traffic, summarize


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, sample standard deviation (0 for a single sample) and percentiles, interpolated between samples."""

    mean: float
    deviation: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution | None:
        """None where there is no sample."""
        if not samples:
            return None
        values = np.asarray(samples, dtype=np.float64)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        return cls(float(values.mean()), deviation, p50, p90, p99)


@dataclass(frozen=True, slots=True)
class RequestMeasures:
    """What a number of requests took; a distribution is None where nothing of its kind happened.

    Attributes:
        requests: how many.
        ttft: seconds to the first token, a sample a request.
        tpot: seconds of a decode step, a sample a step.
        tokens_per_second: a sample a request; of decode, or of the prefill where nothing was decoded. Its mean is
            tokens over time of all requests, not the mean of rates, in which quick requests would count twice.
        prefill_stall, decode_stall: seconds an iteration waited for copies, a sample an iteration.
        prefill, decode: expert traffic of all requests together.
    """

    requests: int
    ttft: Distribution | None
    tpot: Distribution | None
    tokens_per_second: Distribution | None
    prefill_stall: Distribution | None
    decode_stall: Distribution | None
    prefill: Traffic
    decode: Traffic


def measure_requests(requests: Sequence[Sequence[Step]]) -> RequestMeasures:
    """Condense the steps of several ``generate`` calls, one a request."""
    summaries = [summarize(list(steps), prompt_tokens=0) for steps in requests]
    prefills = [step for steps in requests for step in steps if step.phase == "prefill"]
    decodes = [step for steps in requests for step in steps if step.phase == "decode"]
    rates = Distribution.of([summary.tokens_per_second for summary in summaries])
    timed = decodes or prefills
    seconds = sum(step.seconds for step in timed)
    if rates is not None and seconds:
        tokens = sum(token is not None for step in timed for token in step.token_ids)
        rates = replace(rates, mean=tokens / seconds)
    return RequestMeasures(
        requests=len(requests),
        ttft=Distribution.of([summary.ttft for summary in summaries]),
        tpot=Distribution.of([step.seconds for step in decodes]),
        tokens_per_second=rates,
        prefill_stall=Distribution.of([step.traffic.stall_seconds for step in prefills]),
        decode_stall=Distribution.of([step.traffic.stall_seconds for step in decodes]),
        prefill=sum((summary.prefill for summary in summaries), Traffic()),
        decode=sum((summary.decode for summary in summaries), Traffic()),
    )

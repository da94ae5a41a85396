"""Whether what is said with probability p happens in a share p of cases: reliability and expected calibration error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.predictors.fitted import HIDDEN, FittedPredictors
from engine.predictors.fitting import AHEAD, GATES, NEXT, NEXT_RIDGE, START
from engine.predictors.mix import Mix, log_loss
from engine.predictors.row_sample import RowSample
from engine.predictors.sampling import RequestSampler
from engine.traces import TracedRequest

BINS = 15
MIX = "mix"

_MARGIN = "-margin"
_NOT_ALONE = "prior"


@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """Probabilities against frequencies, in bins of equal width.

    Attributes:
        said, seen: float [n], mean probability and share of cases that came true, of the bins with any case.
        counts: int [n], their cases.
        log_loss: mean negative logarithm of what was said of what happened.
    """

    said: np.ndarray
    seen: np.ndarray
    counts: np.ndarray
    log_loss: float

    @property
    def error(self) -> float:
        """Expected calibration error: the mean gap between the two, over cases."""
        return float((np.abs(self.said - self.seen) * self.counts).sum() / self.counts.sum())

    @property
    def largest_gap(self) -> float:
        """Of the bins that hold a thousandth of the cases or more; rare likelihoods hardly move the error."""
        common = self.counts >= 0.001 * self.counts.sum()
        return float(np.abs(self.said - self.seen)[common].max())


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """A predictor at a moment: ``next`` (the next iteration), ``start`` (its embedding known), ``ahead-D``."""

    moment: str
    predictor: str
    reliability: Reliability


def measure_reliability(said: np.ndarray, happened: np.ndarray, bins: int = BINS) -> Reliability:
    """Probabilities [N] against outcomes [N], each 0 or 1."""
    said = said.astype(np.float64)
    place = np.minimum((said * bins).astype(np.int64), bins - 1)
    counts = np.bincount(place, minlength=bins)
    kept = counts > 0
    mean_said, mean_seen = (np.bincount(place, values, bins)[kept] / counts[kept] for values in (said, happened))
    return Reliability(mean_said, mean_seen, counts[kept], log_loss(said, happened))


def judge_predictors(
    fitted: FittedPredictors, fit: Sequence[TracedRequest], test: Sequence[TracedRequest]
) -> list[Judgement]:
    """Each predictor, calibrated by itself, and the mixes, on requests that nothing was fitted on.

    Args:
        fit: requests on which each single predictor is calibrated; not among those of ``fitted``.
        test: requests on which all are judged.
    """
    known, judged = _draw(fitted, fit, 0), _draw(fitted, test, 1)
    judgements = []
    for moment, names in _moments(fitted):
        rows, outcome = judged.rows(moment), judged.outcome(moment)
        mixes: dict[str, Mix] = {name: known.fit(moment, parts) for name, parts in _alone(names)}
        mixes[MIX] = fitted.mixes.get(moment + HIDDEN, fitted.mixes[moment])
        judgements += [Judgement(moment, n, measure_reliability(mix(rows), outcome)) for n, mix in mixes.items()]
    return judgements


def _draw(fitted: FittedPredictors, requests: Sequence[TracedRequest], seed: int) -> RowSample:
    sample = RowSample(seed)
    sampler = RequestSampler(fitted, sample, known_requests=False)
    for request in requests:
        sampler.add_next(request)
        sampler.add_starts(request)
        sampler.add_ahead(request)
    return sample


def _moments(fitted: FittedPredictors) -> Iterator[tuple[str, tuple[str, ...]]]:
    hidden = fitted.reads_gate_inputs
    yield "next", (*NEXT, *(NEXT_RIDGE if hidden else ()))
    if "start" in fitted.mixes:
        yield "start", START
    for distance in range(1, fitted.knowledge.depth + 1):
        if f"ahead-{distance}" in fitted.mixes:
            yield f"ahead-{distance}", (*AHEAD, *(GATES if hidden else ()))


def _alone(names: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Predictors with their features: what they estimate, and its margin to being chosen where there is one."""
    for name in names:
        if name != _NOT_ALONE and not name.endswith(_MARGIN):
            yield name, (name, name + _MARGIN) if name + _MARGIN in names else (name,)

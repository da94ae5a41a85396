"""Calibration of every predictor and of the mix, on requests that nothing was fitted on.

    python -m tests.benchmarks.calibration TRACE.parquet [--steps 64] [--plot calibration.svg]

The trace's requests are divided by the hash of their numbers: 49 % fill the store and fit maps and mixes, 21 %
calibrate each predictor by itself, 30 % are tested. The error is the mean gap between probability and frequency over 15
bins, at most 0.05 of the mix being asked for; gap is the largest of bins with a thousandth of the cases. The losses,
in nats, say how much each predictor knows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.plots import Panel, Series, write_plot
from engine.predictors.calibration import MIX, Judgement, judge_predictors
from engine.predictors.fitting import fit_predictors
from engine.trace_files import read_trace

PLOTTED = ("next", "start", "ahead-1", "ahead-3", "ahead-6")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a request")
    parser.add_argument("--requests", type=int, default=30, help="requests to calibrate on, and to test, at most")
    parser.add_argument("--plot", type=Path, default=None, help="reliability diagrams, as SVG")
    arguments = parser.parse_args()
    known, test = read_trace(arguments.trace).decode_only(arguments.steps).split(0.7)
    store, calibrate = known.split(0.7)
    fitted = fit_predictors(store)
    judgements = judge_predictors(fitted, calibrate.requests[: arguments.requests], test.requests[: arguments.requests])
    print(f"{arguments.trace.name}: store {store.iterations} iterations, test {len(test.requests)} requests")
    print(f"{'moment':9} {'predictor':18} {'error':>7} {'gap':>7} {'loss':>7}")
    for one in judgements:
        said = one.reliability
        print(f"{one.moment:9} {one.predictor:18} {said.error:7.4f} {said.largest_gap:7.4f} {said.log_loss:7.4f}")
    if arguments.plot is not None:
        write_plot(arguments.plot, [panel(moment, judgements) for moment in PLOTTED if _at(moment, judgements)])


def panel(moment: str, judgements: list[Judgement]) -> Panel:
    """The reliability diagram of a moment: the mix and what it is made of."""
    lines = [
        Series(one.predictor, list(zip(one.reliability.said, one.reliability.seen, strict=True)))
        for one in sorted(_at(moment, judgements), key=lambda one: (one.predictor != MIX, one.reliability.log_loss))[:6]
    ]
    diagonal = Series("calibrated", [(0.0, 0.0), (1.0, 1.0)], dashed=True)
    return Panel(moment, "probability", "share of cases", [*lines, diagonal])


def _at(moment: str, judgements: list[Judgement]) -> list[Judgement]:
    return [one for one in judgements if one.moment == moment]


if __name__ == "__main__":
    main()

"""Condense a recorded trace into the small one that comes with finemoe for ``bench --synthetic``.

    finemoe bench record lmsys.parquet --model mini-qwen1.5-moe --dataset lmsys_like.jsonl --teacher-force --turns 1
    python -m tests.benchmarks.bundled_routing lmsys.parquet engine/data/routing/qwen1.5-moe.parquet --requests 8

keeps the first requests with enough decode steps, their routed experts as they are, the gates' distributions in steps
of 1/256, and the embeddings in their principal directions, whose angles are about those of the whole: a trace of some
hundred kilobytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from engine.trace_files import TracedIteration, TraceWriter, read_trace
from engine.traces import TracedRequest

LEVELS = 256
DIRECTIONS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--steps", type=int, default=48, help="decode steps of each")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    kept = [request.take(range(1 + options.steps)) for request in trace.requests if len(request) > options.steps]
    kept = kept[: options.requests]
    manifest = replace(
        trace.manifest,
        model=Path(trace.manifest.model).name,
        hidden_size=DIRECTIONS,
        gate_inputs=False,
        gates=None,
        origin=f"{trace.manifest.origin}; distributions in steps of 1/{LEVELS}, embeddings in {DIRECTIONS} directions",
    )
    basis = principal_directions(kept)
    with TraceWriter(options.target, manifest) as writer:
        for number, request in enumerate(kept):
            for iteration in range(len(request)):
                writer.write(condense(number, request, iteration, basis))
    print(f"{options.target}: {len(kept)} requests, {options.target.stat().st_size:,} bytes")


def principal_directions(requests: Sequence[TracedRequest]) -> np.ndarray:
    """[h, DIRECTIONS], orthonormal, in which the embeddings are longest."""
    embeddings = np.concatenate([r.embeddings for r in requests if r.embeddings is not None])
    return np.linalg.svd(embeddings, full_matrices=False)[2][:DIRECTIONS].T


def condense(number: int, request: TracedRequest, iteration: int, basis: np.ndarray) -> TracedIteration:
    assert request.probabilities is not None and request.embeddings is not None
    bounds = request.offsets[iteration * request.layers : (iteration + 1) * request.layers + 1].tolist()
    spans = [slice(*pair) for pair in pairwise(bounds)]
    return TracedIteration(
        request=number,
        iteration=iteration,
        phase=request.phases[iteration],
        tokens=int(request.tokens[iteration]),
        experts=[request.experts[span] for span in spans],
        counts=[request.counts[span] for span in spans],
        probabilities=np.round(request.probabilities[iteration].astype(np.float32) * LEVELS) / LEVELS,
        embedding=(request.embeddings[iteration] @ basis).astype(np.float16).astype(np.float32),
    )


if __name__ == "__main__":
    main()

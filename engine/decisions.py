"""What a policy's own decisions take: the time that a replay counts as nothing and a running engine does not."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median

from engine.errors import PolicyError
from engine.live_policies import PolicyInputs, build_policy
from engine.records import ExpertMapLibrary, IterationRecord
from engine.router_gates import RouterGates
from engine.streamed import Streamed
from engine.traces import RoutingTrace

_STEPS = 60


def fill_library(library: ExpertMapLibrary, trace: RoutingTrace) -> None:
    """Publish the decode steps of a trace with embeddings, as the engine that recorded them would have."""
    for request in trace.decode_only().requests:
        maps = request.maps(trace.manifest.experts)
        for step, embedding in enumerate(() if request.embeddings is None else request.embeddings):
            record = IterationRecord(
                sequence=request.request,
                iteration=step,
                phase="decode",
                prompt_hash=str(request.request),
                tokens=1,
                embedding=embedding,
                probabilities=maps[step],
            )
            library.publish([record])


def measure_decisions(names: Iterable[str], inputs: PolicyInputs, test: RoutingTrace) -> dict[str, float]:
    """Median seconds that each policy takes to decide in one decode step of one sequence, on this thread alone.

    Policies that need what ``inputs`` or the trace do not hold are left out.
    """
    found = {}
    for name in names:
        try:
            policy = build_policy(name, inputs, lambda: _gates(test))
        except PolicyError:
            continue
        times: list[float] = []
        streamed = Streamed(policy, test.manifest.experts)
        for request in test.decode_only().requests:
            streamed.begin_request(request, len(times) * test.manifest.layers)
            for step in range(min(len(request), _STEPS - len(times))):
                start = time.perf_counter()
                streamed.begin_iteration(step)
                for layer in range(test.manifest.layers):
                    streamed.observe(step, layer)
                times.append(time.perf_counter() - start)
        found[name] = median(times)
    return found


def _gates(trace: RoutingTrace) -> RouterGates:
    if trace.manifest.gates is None:
        raise PolicyError("the trace does not hold what gates read")
    return trace.manifest.gates

"""The least time in which any policy, knowing everything, could answer a trace: what the link has to carry."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import chain

from engine.hardware import Hardware
from engine.traces import RoutingTrace

_NEVER = 1 << 62


def least_iteration_seconds(trace: RoutingTrace, hardware: Hardware, capacity: int, warm_up: int) -> float:
    """Mean time of an iteration after the warm-up that no replay of decode steps can fall below.

    The device computes, and the link carries the transfers that Belady's rule cannot avoid, each at full bandwidth;
    at best the one hides behind the other.
    """
    warm_up = warm_up if warm_up < trace.iterations else 0
    transfers = least_transfers(trace, capacity, warm_up)
    # One may have been under way when the warm-up ended.
    carrying = max(transfers - 1, 0) * hardware.expert_bytes / hardware.bandwidth
    iterations = trace.iterations - warm_up
    return max(iterations * trace.manifest.layers * hardware.layer_seconds, carrying) / iterations


def least_transfers(trace: RoutingTrace, capacity: int, warm_up: int = 0) -> int:
    """Experts that have to cross the link after the warm-up, whatever the device holds by then.

    Belady's rule with leave to bypass: an expert takes a place only if it is used again sooner than one that holds it.
    The device begins with the experts that are used first.
    """
    steps = [step for request in trace.requests for step in request.keys(trace.manifest.experts)]
    uses = list(chain.from_iterable(chain.from_iterable(steps[warm_up:])))
    following = _next_uses(uses)
    resident: dict[int, int] = {}
    for place, key in enumerate(uses):
        if len(resident) == capacity:
            break
        resident.setdefault(key, place)
    latest = [(-place, key) for key, place in resident.items()]
    heapify(latest)
    transfers = 0
    for key, again in zip(uses, following, strict=True):
        if key not in resident:
            transfers += 1
            # What a place in the heap says of an expert is out of date once it has been used since.
            while latest and resident.get(latest[0][1]) != -latest[0][0]:
                heappop(latest)
            if not latest or again >= -latest[0][0]:
                continue
            del resident[heappop(latest)[1]]
        resident[key] = again
        heappush(latest, (-again, key))
    return transfers


def _next_uses(uses: list[int]) -> list[int]:
    """For each use the place of the next one of the same expert."""
    following = [0] * len(uses)
    upcoming: dict[int, int] = {}
    for place in range(len(uses) - 1, -1, -1):
        following[place] = upcoming.get(uses[place], _NEVER)
        upcoming[uses[place]] = place
    return following

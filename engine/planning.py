"""Choosing a policy, a prefetch distance and a budget by replaying recorded routing on measured hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from engine.adaptive_choice import AdaptiveFit
from engine.errors import BudgetError
from engine.hardware import Hardware
from engine.policy_names import POLICIES, SPECULATIVE, PolicyFactory
from engine.replay import Replay, ReplayOutcome
from engine.traces import RoutingTrace, TracedRequest

WARM_UP_ITERATIONS = 200
BASELINE, BOUND = "lru", "perfect"
STOPS_PAYING = 0.10
"""More memory has stopped paying where twice a budget, or any larger one, gives less than so much more tokens/s."""

GUIDED = "finemoe"
"""The policy whose distance is chosen where the best one has no such setting."""

_KNOW_THE_FUTURE = ("oracle", "perfect")
# A running engine lacks the counts of whole requests, and a share of the cache for each layer refuses small budgets:
# these are replayed for comparison and not chosen.
_NOT_CHOSEN = frozenset({"moe-infinity", "hit-count", "lru-layer"})
_WITH_DISTANCE = frozenset(
    {"promoe", "hit-count", "map-t", "map-t+s", "map-t+s+delta", "finemoe", "finemoe-cached-freq"}
)
_AS_GOOD = 0.01


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a replay expects of a policy at a budget.

    Attributes:
        distance: layers between a decision and its use; None where the policy has no such setting.
        capacity: experts the budget holds.
        decision_seconds: what its decisions take in a step, none of it hidden behind the device.
    """

    policy: str
    distance: int | None
    capacity: int
    outcome: ReplayOutcome
    decision_seconds: float = 0.0

    @property
    def stall_seconds(self) -> float:
        """A step's wait for experts."""
        return self.outcome.stall_seconds / self.outcome.iterations

    @property
    def tpot_seconds(self) -> float:
        """Time a token, decisions included."""
        return self.outcome.tpot_seconds + self.decision_seconds

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / self.tpot_seconds


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy to run, the distance for policies that have one, and why, in words.

    Attributes:
        curve: the chosen policy, or ``GUIDED`` where it has no distance, at every distance tried.
        policies: every policy at its best distance, the fastest first.
    """

    policy: str
    distance: int
    reason: str
    curve: tuple[Expectation, ...]
    policies: tuple[Expectation, ...]


@dataclass(frozen=True, slots=True)
class BudgetOutlook:
    """What to expect of a budget: the chosen policy, LRU, and what knowing the future would give; None if too small."""

    share: float
    capacity: int
    chosen: Expectation | None
    baseline: Expectation | None
    bound: Expectation | None


class Planner:
    """Replays the held-out decode steps of a recording against policies that know the other ones.

    The last steps of the store's side run first, uncounted, so that no cache is cold.

    Args:
        store: decode steps whose maps the policies know.
        test: decode steps that are counted.
        map_capacity: C.

    Attributes:
        fit: what ``adaptive`` learns of the store's side.
        decisions: seconds a step that policies take to decide, by name; those that are not there take none.
    """

    def __init__(self, store: RoutingTrace, test: RoutingTrace, hardware: Hardware, map_capacity: int) -> None:
        warm_up = _last_requests(store, WARM_UP_ITERATIONS)
        self._warm_up = sum(map(len, warm_up))
        self._trace = RoutingTrace(test.manifest, (*warm_up, *test.requests))
        self._hardware = hardware
        self.fit = AdaptiveFit(store)
        self.decisions: Mapping[str, float] = {}
        self._factory = cache(lambda d: PolicyFactory(store, self._trace, d, map_capacity, hardware, self.fit))

    @property
    def experts(self) -> int:
        """L * J."""
        return self._trace.manifest.keys

    def expect(self, policy: str, capacity: int, distance: int) -> Expectation:
        """Replay one policy.

        Raises:
            BudgetError: the budget holds fewer than K experts.
        """
        built = self._factory(distance).build(policy, capacity)
        outcome = Replay(self._trace, built, self._hardware, capacity, in_place=False).run(self._warm_up)
        reach = distance if policy in _WITH_DISTANCE else None
        return Expectation(policy, reach, capacity, outcome, self.decisions.get(policy, 0.0))

    def choose(self, distances: Sequence[int], capacity: int) -> Choice:
        """The policy of the least time for waiting and deciding; of those within 1 % of it the simplest.

        Policies whose share of the budget holds fewer than K experts are left out.

        The simpler ones come first in ``POLICIES``. A policy's distance is that of the least stall; of those within
        1 % of it the one that moves least.
        """
        tried: dict[str, list[Expectation]] = {}
        left_out = {*_KNOW_THE_FUTURE, *(SPECULATIVE if self._trace.manifest.gates is None else ())}
        for name in (policy.name for policy in POLICIES if policy.name not in left_out):
            try:
                first = self.expect(name, capacity, distances[0])
            except BudgetError:
                # ``lru-layer`` divides the budget; the others have room for a token if the engine had.
                continue
            rest = distances[1:] if first.distance is not None else ()
            tried[name] = [first, *(self.expect(name, capacity, distance) for distance in rest)]
        at_best = {name: _best(cells) for name, cells in tried.items()}
        candidates = [cell for name, cell in at_best.items() if name not in _NOT_CHOSEN]
        least = min(cell.stall_seconds + cell.decision_seconds for cell in candidates)
        chosen = next(c for c in candidates if c.stall_seconds + c.decision_seconds <= (1 + _AS_GOOD) * least)
        curve = tried[GUIDED if chosen.distance is None else chosen.policy]
        distance = _best(curve).distance
        assert distance is not None
        policies = sorted(at_best.values(), key=lambda cell: cell.tpot_seconds)
        return Choice(chosen.policy, distance, _reason(chosen, candidates, curve), tuple(curve), tuple(policies))

    def look_at(self, share: float, choice: Choice) -> BudgetOutlook:
        """What a share of all experts as the budget lets expect."""
        capacity = int(share * self._trace.manifest.keys)

        def expect(policy: str) -> Expectation | None:
            try:
                return self.expect(policy, capacity, choice.distance)
            except BudgetError:
                return None

        return BudgetOutlook(share, capacity, expect(choice.policy), expect(BASELINE), expect(BOUND))


def find_enough(outlooks: Sequence[BudgetOutlook]) -> float | None:
    """The least share of all experts from which more memory stops paying (``STOPS_PAYING``).

    Between two budgets tokens/s are taken as linear, and twice a budget is at most the largest one. None where no
    budget is large enough for the model.
    """
    known = [(o.share, o.chosen.tokens_per_second) for o in outlooks if o.chosen is not None]
    if not known:
        return None
    shares, speeds = zip(*known, strict=True)
    found = shares[-1]
    # From the largest down: at a small one twice as much may still be too little to matter.
    for share, speed in reversed(known):
        if np.interp(2 * share, shares, speeds) >= (1 + STOPS_PAYING) * speed:
            break
        found = share
    return found


def replay_again(trace: RoutingTrace, requests: int, hardware: Hardware, capacity: int) -> ReplayOutcome:
    """What to expect of the trace's first requests, run once more after all of it, behind LRU."""
    again = RoutingTrace(trace.manifest, (*trace.requests, *trace.requests[:requests]))
    policy = PolicyFactory(trace, again, 1, 1, hardware).build(BASELINE)
    return Replay(again, policy, hardware, capacity, in_place=False).run(trace.iterations)


def _best(cells: Sequence[Expectation]) -> Expectation:
    least = min(cell.stall_seconds for cell in cells)
    as_good = [cell for cell in cells if cell.stall_seconds <= (1 + _AS_GOOD) * least]
    return min(as_good, key=lambda cell: (cell.outcome.bytes_moved, cell.stall_seconds))


def _last_requests(trace: RoutingTrace, iterations: int) -> tuple[TracedRequest, ...]:
    kept: list[TracedRequest] = []
    for request in reversed(trace.requests):
        if sum(map(len, kept)) >= iterations:
            break
        kept.insert(0, request)
    return tuple(kept)


def _reason(chosen: Expectation, candidates: Sequence[Expectation], curve: Sequence[Expectation]) -> str:
    def times(cell: Expectation) -> str:
        return f"waits {cell.stall_seconds * 1e3:.3f} ms a token and takes {cell.decision_seconds * 1e3:.3f} to decide"

    text = f"{chosen.policy} {times(chosen)}, together the least"
    baseline = next(cell for cell in candidates if cell.policy == BASELINE)
    quickest = min(candidates, key=lambda cell: cell.stall_seconds)
    for other in dict.fromkeys((baseline, quickest)):
        if other is not chosen:
            text += f"; {other.policy} {times(other)}"
    at = _best(curve)
    place = list(curve).index(at)
    text += f"; distance {at.distance}" + ("" if chosen.distance is not None else f" for {at.policy}")
    for other in (*curve[max(place - 1, 0) : place], *curve[place + 1 : place + 2]):
        waits = other.stall_seconds - at.stall_seconds
        hit, late = other.outcome.hit - at.outcome.hit, other.outcome.late - at.outcome.late
        text += f"; {other.distance} would wait {waits * 1e3:+.3f} ms with {hit:+.1%} hits and {late:+.1%} late"
    return text

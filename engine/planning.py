"""Choosing a policy, a prefetch distance and a budget by replaying recorded routing on measured hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from engine.adaptive_choice import AdaptiveFit
from engine.errors import BudgetError
from engine.hardware import Hardware
from engine.policies import Guided
from engine.policy_names import POLICIES, SPECULATIVE, PolicyFactory
from engine.replay import Replay, ReplayOutcome
from engine.traces import RoutingTrace, TracedRequest

WARM_UP_ITERATIONS = 200
BASELINE, BOUND = "lru", "perfect"
STOPS_PAYING = 0.10
"""More memory has stopped paying where twice the budget gives less than so much more tokens/s."""

GUIDED = "finemoe"
"""The policy whose distance is chosen where the best one has no such setting."""

_KNOW_THE_FUTURE = ("oracle", "perfect")
# A running engine lacks the counts of whole requests, a share of the cache for each layer refuses small budgets, and
# some policies are for replays alone: they are replayed for comparison and not chosen.
_NOT_CHOSEN = frozenset({"moe-infinity", "hit-count", "lru-layer", "adaptive"})
_WHOLE_ITERATIONS = "moe-infinity"
_AS_GOOD = 0.01


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a replay expects of a policy at a budget.

    Attributes:
        distance: layers between a decision and its use; None where the policy has no such setting.
        capacity: experts the budget holds.
    """

    policy: str
    distance: int | None
    capacity: int
    outcome: ReplayOutcome

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / self.outcome.tpot_seconds


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
    """

    def __init__(self, store: RoutingTrace, test: RoutingTrace, hardware: Hardware, map_capacity: int) -> None:
        warm_up = _last_requests(store, WARM_UP_ITERATIONS)
        self._warm_up = sum(map(len, warm_up))
        self._trace = RoutingTrace(test.manifest, (*warm_up, *test.requests))
        self._hardware = hardware
        fit = AdaptiveFit(store)
        self._factory = cache(lambda d: PolicyFactory(store, self._trace, d, map_capacity, hardware, fit))

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
        has_distance = isinstance(built, Guided) and policy != _WHOLE_ITERATIONS
        return Expectation(policy, distance if has_distance else None, capacity, outcome)

    def choose(self, distances: Sequence[int], capacity: int) -> Choice:
        """The policy and distance of the least expected stall; of those within 1 % of it the one that moves least."""
        tried: dict[str, list[Expectation]] = {}
        left_out = {*_KNOW_THE_FUTURE, *(SPECULATIVE if self._trace.manifest.gates is None else ())}
        for name in (policy.name for policy in POLICIES if policy.name not in left_out):
            first = self.expect(name, capacity, distances[0])
            rest = distances[1:] if first.distance is not None else ()
            tried[name] = [first, *(self.expect(name, capacity, distance) for distance in rest)]
        fastest = sorted(map(_best, tried.values()), key=lambda e: e.outcome.tpot_seconds)
        best = _best([e for e in fastest if e.policy not in _NOT_CHOSEN])
        curve = tried[GUIDED if best.distance is None else best.policy]
        distance = _best(curve).distance
        assert distance is not None
        return Choice(best.policy, distance, _reason(best, fastest, curve), tuple(curve), tuple(fastest))

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
    for share, speed in known:
        if np.interp(2 * share, shares, speeds) < (1 + STOPS_PAYING) * speed:
            return share
    return shares[-1]


def replay_again(trace: RoutingTrace, requests: int, hardware: Hardware, capacity: int) -> ReplayOutcome:
    """What to expect of the trace's first requests, run once more after all of it, behind LRU."""
    again = RoutingTrace(trace.manifest, (*trace.requests, *trace.requests[:requests]))
    policy = PolicyFactory(trace, again, 1, 1, hardware).build(BASELINE)
    return Replay(again, policy, hardware, capacity, in_place=False).run(trace.iterations)


def _best(cells: Sequence[Expectation]) -> Expectation:
    least = min(cell.outcome.stall_seconds for cell in cells)
    as_good = [cell for cell in cells if cell.outcome.stall_seconds <= (1 + _AS_GOOD) * least]
    return min(as_good, key=lambda cell: (cell.outcome.bytes_moved, cell.outcome.stall_seconds))


def _last_requests(trace: RoutingTrace, iterations: int) -> tuple[TracedRequest, ...]:
    kept: list[TracedRequest] = []
    for request in reversed(trace.requests):
        if sum(map(len, kept)) >= iterations:
            break
        kept.insert(0, request)
    return tuple(kept)


def _reason(best: Expectation, policies: Sequence[Expectation], curve: Sequence[Expectation]) -> str:
    tpot = best.outcome.tpot_seconds
    text = f"{best.policy}, which lets a token wait least for experts of the policies an engine can run here"
    baseline = next(e for e in policies if e.policy == BASELINE)
    if best.policy != BASELINE:
        stall = (
            1 - best.outcome.stall_seconds / baseline.outcome.stall_seconds if baseline.outcome.stall_seconds else 0.0
        )
        time = 1 - tpot / baseline.outcome.tpot_seconds
        text += f" ({stall:.0%} less than {BASELINE}, {time:.0%} less time a token)"
    chosen = _best(curve)
    place = list(curve).index(chosen)
    whose = "" if best.distance is not None else f" for {chosen.policy}"
    text += f"; distance {chosen.distance}{whose}"
    for other in (*curve[max(place - 1, 0) : place], *curve[place + 1 : place + 2]):
        waits = (other.outcome.stall_seconds - chosen.outcome.stall_seconds) / chosen.outcome.iterations
        hit, late = other.outcome.hit - chosen.outcome.hit, other.outcome.late - chosen.outcome.late
        text += f"; {other.distance} would wait {waits * 1e3:+.3f} ms a token with {hit:+.1%} hits and {late:+.1%} late"
    return text

"""Policies by name for a live engine, and for replays that drive a policy as an engine does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.adaptive import Adaptive, AdaptivePlan
from engine.adaptive_choice import AdaptiveFit
from engine.bounds import NextUse, Perfect
from engine.errors import PolicyError
from engine.eviction import EvictionRule, FirstInFirstOut, LeastFrequentlyUsed, LeastRecentlyUsed, ProbabilityFrequency
from engine.guided import CountGuided, MapGuided
from engine.map_search import ActivationCounts
from engine.policies import OnDemand, Policy
from engine.policy_names import check_policies
from engine.records import ExpertMapLibrary
from engine.router_gates import RouterGates
from engine.speculative import Speculative
from engine.traces import RoutingTrace

_T = TypeVar("_T")

DEFAULT_DISTANCE = 3

SEARCHING = frozenset({"map-t", "map-t+s", "map-t+s+delta", "finemoe", "finemoe-cached-freq"})
"""Policies that search a library of expert maps."""

TAUGHT = frozenset({"moe-infinity", "hit-count", "adaptive"})
"""Policies that are taught by the routing of earlier requests, once, before they run."""

KNOWING = frozenset({"oracle", "perfect"})
"""Bounds, which know the routing to come."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInputs:
    """What policies are built from.

    Attributes:
        layers, experts, top_k: L, J, K.
        distance: d, layers between a prefetch decision and its use.
        library: expert maps to search; None where there are none.
        history: routing of earlier requests, for policies that count it; None where there is none.
        future: routing that is to come, for the bounds; None where it is unknown, as in life.
        adaptive: predictors and settings of ``adaptive``; None to fit them on ``history``.
    """

    layers: int
    experts: int
    top_k: int
    distance: int
    library: ExpertMapLibrary | None = None
    history: RoutingTrace | None = None
    future: RoutingTrace | None = None
    adaptive: AdaptivePlan | None = None


def check_needs(name: str, inputs: PolicyInputs) -> None:
    """Refuse a policy that needs something that is not given, before anything slow.

    Raises:
        PolicyError: or there is no such policy.
    """
    check_policies([name])
    if name in SEARCHING and inputs.library is None:
        raise PolicyError(f"policy {name!r} searches expert maps, but no store is open: give one, or take lru")
    if name in KNOWING and inputs.future is None:
        raise PolicyError(f"policy {name!r} knows the future, which has to be recorded first: see 'finemoe bench'")
    if name in TAUGHT and inputs.history is None and (name != "adaptive" or inputs.adaptive is None):
        raise PolicyError(
            f"policy {name!r} is taught by the routing of earlier requests, but none is given: 'finemoe bench' does"
        )


def build_policy(name: str, inputs: PolicyInputs, find_gates: Callable[[], RouterGates]) -> Policy:
    """A policy in its first state.

    Args:
        find_gates: reads the model's routers, for policies that apply later gates to earlier inputs.

    Raises:
        PolicyError: no such policy, or it needs something that is not given.
        UnsupportedModelError: it needs routers that are linear maps, and the model's are not.
    """
    check_needs(name, inputs)
    keys = inputs.layers * inputs.experts
    builders: dict[str, Callable[[], Policy]] = {
        "lru": lambda: OnDemand(LeastRecentlyUsed(keys)),
        "lru-layer": lambda: OnDemand(LeastRecentlyUsed(keys), per_layer=True),
        "lfu": lambda: OnDemand(LeastFrequentlyUsed(keys)),
        "on-demand": lambda: OnDemand(FirstInFirstOut(keys)),
        "moe-infinity": lambda: _counted(inputs, LeastFrequentlyUsed(keys), inputs.layers),
        "hit-count": lambda: _counted(inputs, LeastRecentlyUsed(keys), inputs.distance),
        "map-t": lambda: _mapped(inputs, LeastRecentlyUsed(keys), semantic=False, by_score=False),
        "map-t+s": lambda: _mapped(inputs, LeastRecentlyUsed(keys), by_score=False),
        "map-t+s+delta": lambda: _mapped(inputs, LeastRecentlyUsed(keys)),
        "finemoe": lambda: _mapped(inputs, ProbabilityFrequency(keys)),
        "finemoe-cached-freq": lambda: _mapped(inputs, ProbabilityFrequency(keys, while_cached=True)),
        "mixtral-offloading": lambda: Speculative(LeastRecentlyUsed(keys), find_gates(), inputs.top_k, 1),
        "promoe": lambda: Speculative(LeastRecentlyUsed(keys), find_gates(), inputs.top_k, inputs.distance),
        "adaptive": lambda: _adaptive(inputs),
        "oracle": lambda: OnDemand(NextUse(_given(inputs.future))),
        "perfect": lambda: Perfect(_given(inputs.future)),
    }
    return builders[name]()


def _mapped(inputs: PolicyInputs, rule: EvictionRule, semantic: bool = True, by_score: bool = True) -> Policy:
    shape = (inputs.layers, inputs.experts, inputs.top_k, inputs.distance)
    return MapGuided(rule, _given(inputs.library), *shape, semantic=semantic, by_score=by_score)


def _counted(inputs: PolicyInputs, rule: EvictionRule, distance: int) -> Policy:
    counts = ActivationCounts.of(_given(inputs.history))
    return CountGuided(rule, counts, inputs.layers, inputs.experts, inputs.top_k, distance)


def _adaptive(inputs: PolicyInputs) -> Policy:
    plan = inputs.adaptive or AdaptiveFit(_given(inputs.history)).plan(None)
    if plan.settings is None:
        return OnDemand(LeastRecentlyUsed(inputs.layers * inputs.experts))
    return Adaptive(plan.predictors, plan.settings, plan.hardware, plan.capacity)


def _given(value: _T | None) -> _T:
    """What ``check_needs`` has found to be there."""
    assert value is not None
    return value

"""Policies by name for a live engine, and for replays that drive a policy as an engine does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.adaptive import Adaptive, AdaptivePlan
from engine.adaptive_choice import AdaptiveFit
from engine.bounds import NextUse, Perfect
from engine.errors import PolicyError
from engine.eviction import EvictionRule, LeastFrequentlyUsed, LeastRecentlyUsed, ProbabilityFrequency
from engine.guided import CountGuided, MapGuided
from engine.map_search import ActivationCounts
from engine.policies import OnDemand, Policy
from engine.policy_names import check_policies
from engine.records import ExpertMapLibrary
from engine.router_gates import RouterGates
from engine.speculative import Speculative
from engine.traces import RoutingTrace

DEFAULT_DISTANCE = 3

SEARCHING = frozenset({"map-t", "map-t+s", "map-t+s+delta", "finemoe", "finemoe-cached-freq"})
"""Policies that search a library of expert maps."""

TAUGHT = frozenset({"moe-infinity", "hit-count", "adaptive"})
"""Policies that are taught by the routing of earlier requests, once, before they run."""


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


def build_policy(name: str, inputs: PolicyInputs, find_gates: Callable[[], RouterGates]) -> Policy:
    """A policy in its first state.

    Args:
        find_gates: reads the model's routers, for policies that apply later gates to earlier inputs.

    Raises:
        PolicyError: no such policy, or it needs something that is not given.
        UnsupportedModelError: it needs routers that are linear maps, and the model's are not.
    """
    check_policies([name])
    keys = inputs.layers * inputs.experts
    builders: dict[str, Callable[[], Policy]] = {
        "lru": lambda: OnDemand(LeastRecentlyUsed(keys)),
        "lru-layer": lambda: OnDemand(LeastRecentlyUsed(keys), per_layer=True),
        "lfu": lambda: OnDemand(LeastFrequentlyUsed(keys)),
        "moe-infinity": lambda: _counted(name, inputs, LeastFrequentlyUsed(keys), inputs.layers),
        "hit-count": lambda: _counted(name, inputs, LeastRecentlyUsed(keys), inputs.distance),
        "map-t": lambda: _mapped(name, inputs, LeastRecentlyUsed(keys), semantic=False, by_score=False),
        "map-t+s": lambda: _mapped(name, inputs, LeastRecentlyUsed(keys), by_score=False),
        "map-t+s+delta": lambda: _mapped(name, inputs, LeastRecentlyUsed(keys)),
        "finemoe": lambda: _mapped(name, inputs, ProbabilityFrequency(keys)),
        "finemoe-cached-freq": lambda: _mapped(name, inputs, ProbabilityFrequency(keys, while_cached=True)),
        "mixtral-offloading": lambda: Speculative(LeastRecentlyUsed(keys), find_gates(), inputs.top_k, 1),
        "promoe": lambda: Speculative(LeastRecentlyUsed(keys), find_gates(), inputs.top_k, inputs.distance),
        "adaptive": lambda: _adaptive(name, inputs),
        "oracle": lambda: OnDemand(NextUse(_future(name, inputs))),
        "perfect": lambda: Perfect(_future(name, inputs)),
    }
    return builders[name]()


def _mapped(
    name: str, inputs: PolicyInputs, rule: EvictionRule, semantic: bool = True, by_score: bool = True
) -> Policy:
    if inputs.library is None:
        raise PolicyError(f"policy {name!r} searches expert maps, but no store is open: give one, or take lru")
    shape = (inputs.layers, inputs.experts, inputs.top_k, inputs.distance)
    return MapGuided(rule, inputs.library, *shape, semantic=semantic, by_score=by_score)


def _counted(name: str, inputs: PolicyInputs, rule: EvictionRule, distance: int) -> Policy:
    if inputs.history is None:
        raise PolicyError(f"policy {name!r} counts the uses of earlier requests, but none are given")
    return CountGuided(rule, ActivationCounts.of(inputs.history), inputs.layers, inputs.experts, inputs.top_k, distance)


def _adaptive(name: str, inputs: PolicyInputs) -> Policy:
    plan = inputs.adaptive
    if plan is None:
        if inputs.history is None:
            raise PolicyError(f"policy {name!r} is fitted on the routing of earlier requests, but none is given")
        plan = AdaptiveFit(inputs.history).plan(None)
    if plan.settings is None:
        return OnDemand(LeastRecentlyUsed(inputs.layers * inputs.experts))
    return Adaptive(plan.predictors, plan.settings, plan.hardware, plan.capacity)


def _future(name: str, inputs: PolicyInputs) -> RoutingTrace:
    if inputs.future is None:
        raise PolicyError(f"policy {name!r} knows the future: record the requests first")
    return inputs.future

"""The policies of the field by name, each a predictor, a selection and an eviction rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from engine.adaptive import PreparedAdaptive
from engine.adaptive_choice import AdaptiveFit
from engine.bounds import NextUse, PreparedPerfect
from engine.errors import PolicyError
from engine.eviction import EvictionRule, FirstInFirstOut, LeastFrequentlyUsed, LeastRecentlyUsed, ProbabilityFrequency
from engine.hardware import Hardware
from engine.map_search import ActivationCounts, MapArchive
from engine.policies import Guided, PreparedOnDemand, PreparedPolicy
from engine.speculative import PreparedSpeculative
from engine.traces import RoutingTrace


@dataclass(frozen=True, slots=True)
class PolicyName:
    """A policy's name and what it does, in a line."""

    name: str
    summary: str


POLICIES = (
    PolicyName("lru", "on demand, one LRU cache for all layers"),
    PolicyName("lru-layer", "on demand, an equal share of LRU cache for each layer"),
    PolicyName("lfu", "on demand, evicting the expert used least often so far"),
    PolicyName(
        "on-demand", "on demand, evicting the expert that came first (DeepSpeed-Inference with an expert cache)"
    ),
    PolicyName("mixtral-offloading", "the next layer's gate on the present gate's input, the K likeliest, LRU"),
    PolicyName("promoe", "the gate at distance d on the present gate's input, the K likeliest, LRU"),
    PolicyName("moe-infinity", "request-level counts, nearest stored request guides whole iterations, LFU"),
    PolicyName("hit-count", "request-level counts at distance d, the K likeliest, LRU"),
    PolicyName("map-t", "trajectory search at distance d, the K likeliest, LRU"),
    PolicyName("map-t+s", "map-t, and semantic search for the first d layers"),
    PolicyName("map-t+s+delta", "map-t+s, and the paper's delta instead of K"),
    PolicyName("finemoe", "map-t+s+delta, evicting by 1/(p*freq) with freq since the start"),
    PolicyName("finemoe-cached-freq", "finemoe with freq counted anew whenever an expert is evicted"),
    PolicyName("adaptive", "evicts the lowest expected use, fetches likely experts in time; fitted on the store"),
    PolicyName("oracle", "on demand, Belady's eviction: knows the future"),
    PolicyName("perfect", "prefetches exactly what follows, Belady's eviction: knows the future"),
)

# Those that search the store by embeddings where a trace has them.
SEMANTIC = frozenset({"map-t+s", "map-t+s+delta", "finemoe", "finemoe-cached-freq"})

# Those that read what gates read.
SPECULATIVE = frozenset({"mixtral-offloading", "promoe"})


class PolicyFactory:
    """Builds fresh policies for one pair of traces; stores are searched out once and shared.

    Args:
        store: requests whose maps are known beforehand.
        test: requests to be replayed, seen only by the policies that know the future.
        distance: d, layers between a prefetch decision and its use.
        capacity: C, the maps of the store.
        hardware: what a prefetch costs.
        fit: what ``adaptive`` takes from the store, where factories for several machines share it.
    """

    def __init__(
        self,
        store: RoutingTrace,
        test: RoutingTrace,
        distance: int,
        capacity: int,
        hardware: Hardware,
        fit: AdaptiveFit | None = None,
    ) -> None:
        self._store = store
        self._test = test
        self._distance = min(distance, test.manifest.layers)
        self._capacity = capacity
        self._hardware = hardware
        # What a search finds depends on neither cache nor rule: every policy and budget shares it.
        self._search_counts = cache(lambda request: self._counts.search(request))
        self._search_maps = cache(lambda request, semantic: self._archive.search(request, semantic))
        self._fit = AdaptiveFit(store) if fit is None else fit

    @cached_property
    def _archive(self) -> MapArchive:
        return MapArchive.of(self._store, self._capacity)

    @cached_property
    def _counts(self) -> ActivationCounts:
        return ActivationCounts.of(self._store)

    def build(self, name: str, capacity: int | None = None, in_place: bool = False) -> PreparedPolicy:
        """A policy in its first state.

        Args:
            capacity: experts the device has room for, which ``adaptive`` is tuned to; None for middling settings.
            in_place: missed experts are read where they lie, see ``Replay``.

        Raises:
            PolicyError: unknown name, or the trace lacks what it needs.
        """
        check_policies([name])
        keys = self._test.manifest.keys
        builders: dict[str, Callable[[], PreparedPolicy]] = {
            "lru": lambda: PreparedOnDemand(LeastRecentlyUsed(keys)),
            "lru-layer": lambda: PreparedOnDemand(LeastRecentlyUsed(keys), per_layer=True),
            "lfu": lambda: PreparedOnDemand(LeastFrequentlyUsed(keys)),
            "on-demand": lambda: PreparedOnDemand(FirstInFirstOut(keys)),
            "moe-infinity": lambda: self._counted(LeastFrequentlyUsed(keys), self._test.manifest.layers),
            "hit-count": lambda: self._counted(LeastRecentlyUsed(keys), self._distance),
            "map-t": lambda: self._mapped(LeastRecentlyUsed(keys), semantic=False, by_score=False),
            "map-t+s": lambda: self._mapped(LeastRecentlyUsed(keys), semantic=True, by_score=False),
            "map-t+s+delta": lambda: self._mapped(LeastRecentlyUsed(keys), semantic=True, by_score=True),
            "finemoe": lambda: self._mapped(ProbabilityFrequency(keys), semantic=True, by_score=True),
            "finemoe-cached-freq": lambda: self._mapped(
                ProbabilityFrequency(keys, while_cached=True), semantic=True, by_score=True
            ),
            "mixtral-offloading": lambda: self._speculative(name, 1),
            "promoe": lambda: self._speculative(name, self._distance),
            "adaptive": lambda: self._adaptive(capacity, in_place),
            "oracle": lambda: PreparedOnDemand(NextUse(self._test)),
            "perfect": lambda: PreparedPerfect(self._test),
        }
        return builders[name]()

    def _adaptive(self, capacity: int | None, in_place: bool) -> PreparedPolicy:
        manifest = self._test.manifest
        settings = self._fit.plan(self._hardware, capacity, in_place).settings
        if settings is None:
            return PreparedOnDemand(LeastRecentlyUsed(manifest.keys))
        return PreparedAdaptive(
            manifest.layers, manifest.experts, self._hardware, capacity, settings, self._fit.forecasts()
        )

    def _speculative(self, name: str, distance: int) -> PreparedPolicy:
        manifest = self._test.manifest
        if manifest.gates is None:
            raise PolicyError(
                f"policy {name!r} applies later gates to what the present one read, which this trace does not hold: "
                "record it with --gate-inputs"
            )
        return PreparedSpeculative(LeastRecentlyUsed(manifest.keys), manifest.gates, manifest.top_k, distance)

    def _counted(self, rule: EvictionRule, distance: int) -> PreparedPolicy:
        return Guided(rule, self._search_counts, distance, self._test.manifest.top_k, by_score=False)

    def _mapped(self, rule: EvictionRule, semantic: bool, by_score: bool) -> PreparedPolicy:
        return Guided(
            rule,
            lambda request: self._search_maps(request, semantic),
            self._distance,
            self._test.manifest.top_k,
            by_score,
        )


def cache_partitions(name: str, layers: int) -> int:
    """Into how many equal shares a policy divides the cache.

    Raises:
        PolicyError: no policy has that name.
    """
    check_policies([name])
    return layers if name == "lru-layer" else 1


def check_policies(names: Sequence[str]) -> None:
    """Refuse names that no policy has, before anything slow.

    Raises:
        PolicyError: with the names there are.
    """
    known = [policy.name for policy in POLICIES]
    for name in names:
        if name not in known:
            raise PolicyError(f"no policy {name!r}; there are {', '.join(known)}")

"""The grid of ``finemoe bench replay``: every trace, budget and policy on one machine, a record each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.budget import ExpertBudget
from engine.errors import BudgetError, PolicyError, TraceError
from engine.hardware import Hardware
from engine.link_bound import least_iteration_seconds
from engine.policy_names import SEMANTIC, SPECULATIVE, PolicyFactory
from engine.replay import Replay, ReplayOutcome
from engine.trace_files import read_manifest, read_trace
from engine.traces import RoutingTrace, TraceManifest
from finemoe_cli.console import note

COLUMNS = ("trace", "cache", "policy", "tpot_ms", "hit", "late", "miss", "bytes_moved", "wasted_bytes", "stall_ms")

_PREFILL_FIELDS = (
    "ttft_ms",
    "prefills",
    "prefill_hit",
    "prefill_late",
    "prefill_miss",
    "prefill_bytes_moved",
    "prefill_stall_ms",
)


@dataclass(frozen=True, slots=True)
class ReplayGrid:
    """What to replay.

    Attributes:
        traces: files, each by itself.
        policies: names.
        caches: budgets for the experts.
        hardware: link, sizes and times.
        in_place: missed experts are read over the link where they lie.
        store_share: share of a trace's requests whose maps the policies know; the others are replayed.
        map_capacity: C.
        distance: d.
        limit: decode steps of each request; None for all.
        prefill: replay prefills, too.
        warm_up: iterations left out of the figures.
    """

    traces: Sequence[Path]
    policies: Sequence[str]
    caches: Sequence[ExpertBudget]
    hardware: Hardware
    in_place: bool
    store_share: float
    map_capacity: int
    distance: int
    limit: int | None
    prefill: bool
    warm_up: int

    def run(self) -> Iterator[dict[str, Any]]:
        """A record a cell; cells that cannot be replayed are named on stderr and left out.

        Raises:
            TraceError: a trace cannot be read, which is found before any is replayed, or not be divided.
            BudgetError, PolicyError: no cell is left, for this reason.
        """
        for path in self.traces:
            read_manifest(path)
        replayed, reason = False, None
        for path in self.traces:
            store, test = self._divide(path)
            if test.manifest.hidden_size is None and SEMANTIC.intersection(self.policies):
                note(f"{path.name} has no embeddings: semantic search is left out, so nothing guides the first layers")
            policies = self._possible(path, test.manifest)
            factory = PolicyFactory(store, test, self.distance, self.map_capacity, self.hardware)
            warm_up = self.warm_up
            if warm_up >= test.iterations:
                note(f"{path.name} has {test.iterations} iterations to replay, not more than --warm-up: all count")
                warm_up = 0
            total = test.manifest.keys * self.hardware.expert_bytes
            for cache in self.caches:
                capacity = cache.resolve(total, None) // self.hardware.expert_bytes
                bound = None
                if not self.prefill:
                    bound = least_iteration_seconds(test, self.hardware, capacity, warm_up) * 1e3
                for name in policies:
                    try:
                        replay = Replay(
                            test, factory.build(name, capacity, self.in_place), self.hardware, capacity, self.in_place
                        )
                    except (BudgetError, PolicyError) as error:
                        note(f"left out: {name} at {cache.text}: {error}")
                        reason = error
                        continue
                    replayed = True
                    record = {
                        **self._record(path, name, cache, capacity, replay.run(warm_up), test.manifest.model),
                        "warm_up": warm_up,
                        **asdict(self.hardware),
                    }
                    yield record if bound is None else {**record, "bound_ms": bound}
        if reason is not None and not replayed:
            raise reason

    def _divide(self, path: Path) -> tuple[RoutingTrace, RoutingTrace]:
        """Decode steps that the policies know, and what is replayed: other requests."""
        trace = read_trace(path)
        try:
            store, test = trace.decode_only(self.limit).split(self.store_share)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from error
        if self.prefill:
            _, test = trace.first_steps(self.limit).split(self.store_share)
        return store, test

    def _possible(self, path: Path, manifest: TraceManifest) -> Sequence[str]:
        """The policies that the trace allows, unless that is none of them: building them then tells why."""
        names = [name for name in self.policies if manifest.gates is not None or name not in SPECULATIVE]
        if not names or len(names) == len(self.policies):
            return self.policies
        left_out = [name for name in self.policies if name not in names]
        note(f"{path.name} has no gate inputs: left out: {', '.join(left_out)}")
        return names

    def _record(
        self, path: Path, policy: str, cache: ExpertBudget, capacity: int, outcome: ReplayOutcome, model: str
    ) -> dict[str, Any]:
        return {
            "trace": path.name,
            "model": model,
            "policy": policy,
            "cache": cache.text,
            "cache_experts": capacity,
            "executor": "in-place" if self.in_place else "wait",
            "iterations": outcome.iterations,
            "routed": outcome.routed,
            "tpot_ms": outcome.tpot_seconds * 1e3,
            "hit": outcome.hit,
            "late": outcome.late,
            "miss": outcome.miss,
            "bytes_moved": outcome.bytes_moved,
            "wasted_bytes": outcome.wasted_bytes,
            "stall_ms": outcome.stall_seconds / outcome.iterations * 1e3,
            **(_prefill_fields(outcome.prefill) if self.prefill else {}),
            "store_share": self.store_share,
            "map_capacity": self.map_capacity,
            "distance": self.distance,
        }


def _prefill_fields(prefill: ReplayOutcome | None) -> dict[str, Any]:
    """Of a trace none of whose prefills was counted, each is None."""
    values: tuple[float | None, ...] = (None,) * len(_PREFILL_FIELDS)
    if prefill is not None:
        values = (
            prefill.tpot_seconds * 1e3,
            prefill.iterations,
            prefill.hit,
            prefill.late,
            prefill.miss,
            prefill.bytes_moved,
            prefill.stall_seconds / prefill.iterations * 1e3,
        )
    return dict(zip(_PREFILL_FIELDS, values, strict=True))

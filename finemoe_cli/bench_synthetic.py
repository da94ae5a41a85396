"""``finemoe bench --synthetic``: full-size shapes with random weights, walked through by a trace's routing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.decoding import drives_itself
from engine.devices import choose_device, choose_dtype
from engine.errors import DeviceError, UsageError
from engine.footprint import ModelFootprint, measure_model
from engine.live_policies import SEARCHING
from engine.machine import identify_machine
from engine.policy_names import SPECULATIVE
from engine.room import MemoryRoom
from engine.slots import slots_within
from engine.source import ModelSource
from engine.synthetic import synthetic_config, synthetic_source
from engine.synthetic_routing import bundled_trace, draw_trace, map_records, shape_trace
from engine.trace_files import read_trace
from engine.traces import RoutingTrace
from finemoe_cli.bench_engines import ADAPTIVE
from finemoe_cli.bench_keeping import BenchKeeper
from finemoe_cli.bench_plan import BenchPlan
from finemoe_cli.bench_stores import BenchStore
from finemoe_cli.bench_synthetic_grid import SyntheticGrid, SyntheticWalk, length_of
from finemoe_cli.bench_synthetic_records import RANDOM, REPLAYED, SyntheticIdentity
from finemoe_cli.console import note
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.quantities import count_of
from finemoe_cli.settings import Settings

_BUNDLED = "bundled"
_DRAWN_PROMPT = 64


@dataclass(frozen=True, slots=True)
class SyntheticRequest:
    """What is asked for: a shape by name, its first layers or None for all, a trace's file, "random" or None."""

    shape: str
    layers: int | None
    routing: str | None


class SyntheticBench:
    """Prepares a grid, runs it, and keeps its records.

    Raises, while it is made:
        UsageError, BudgetError, DeviceError: the plan cannot be carried out with this shape on this machine.
        TraceError: the routing is of another shape, or cannot be read.
    """

    def __init__(
        self,
        settings: Settings,
        asked: SyntheticRequest,
        plan: BenchPlan,
        capacity: int | None,
        options: Mapping[str, Any],
    ) -> None:
        """``capacity``: of the store; ``options``: the command's, as given."""
        source = synthetic_source(asked.shape, asked.layers)
        device, dtype = choose_device(settings.device.text), choose_dtype(settings.dtype.text, source.config)
        for executor in plan.executors:
            drives_itself(executor, device)
        trace, identity = _open_routing(asked, source, plan)
        walks = [_walk(trace, identity, source, plan, new_tokens) for new_tokens in plan.new_tokens]
        plan = replace(plan, policies=_possible(plan.policies, walks[0].store))
        size = measure_model(source.config, dtype, source.name)
        room = MemoryRoom.of(device)
        _check_memory(plan, source, size, room, walks)
        longest = max(walks, key=lambda walk: walk.new_tokens)
        store = BenchStore.temporary(source, capacity, plan.distance, [*identity.fields().values(), plan.store_prompts])
        if longest.store.manifest.hidden_size is not None:
            for request in longest.store.requests:
                store.maps.publish(map_records(request, source.fingerprint.experts))
        machine = identify_machine(device, dtype)
        self._keeper = BenchKeeper(settings, source, machine, f"{identity.routing} routing", options)
        shared = {**self._keeper.identity(str(device), None), **identity.fields()}
        self._interrupt = Interruptible()
        self._grid = SyntheticGrid(
            settings, source, plan, walks, store, size, room, device, dtype, shared, self._interrupt
        )

    def records(self) -> Iterator[dict[str, Any]]:
        """Measure; yield each record once the catalog holds it. Whatever ends it, the records so far are kept."""
        return self._keeper.keep(self._grid.measure(), self._interrupt, lambda: False)

    def check_outcome(self) -> None:
        """Raise what ended the measurement before its time."""
        if self._keeper.ended_by is not None:
            raise self._keeper.ended_by


def _open_routing(
    asked: SyntheticRequest, source: ModelSource, plan: BenchPlan
) -> tuple[RoutingTrace, SyntheticIdentity]:
    """The trace as it is, whole, and what records say of it."""
    layers, experts, top_k = _whole_shape(asked.shape, source)
    if asked.routing == RANDOM:
        trace = draw_trace(
            (layers, experts, top_k),
            plan.store_prompts + plan.test_prompts,
            _DRAWN_PROMPT,
            max(plan.new_tokens),
        )
    elif asked.routing is not None:
        trace = read_trace(Path(asked.routing))
    else:
        bundled = bundled_trace(asked.shape)
        if bundled is None:
            raise UsageError(
                f"no routing of a trained model of {layers} layers of {experts} experts, top {top_k}, comes with "
                f"finemoe: give --routing TRACE, as 'finemoe bench record' makes of one, or --routing {RANDOM}"
            )
        trace = bundled
    random = asked.routing == RANDOM
    identity = SyntheticIdentity(
        shape=asked.shape,
        layers=source.fingerprint.layers,
        layers_in_full=layers,
        routing=RANDOM if random else REPLAYED,
        routing_trace=None if random else _BUNDLED if asked.routing is None else Path(asked.routing).name,
        routing_model=trace.manifest.model,
        routing_origin=trace.manifest.origin,
    )
    return trace, identity


def _whole_shape(shape: str, source: ModelSource) -> tuple[int, int, int]:
    """L, J, K of all layers."""
    return synthetic_config(shape).num_hidden_layers, source.fingerprint.experts, source.fingerprint.top_k


def _walk(
    trace: RoutingTrace, identity: SyntheticIdentity, source: ModelSource, plan: BenchPlan, new_tokens: int
) -> SyntheticWalk:
    where = identity.routing_trace or RANDOM
    whole = _whole_shape(identity.shape, source)
    shaped = shape_trace(trace, identity.layers, whole, source.fingerprint.hidden_size, new_tokens, where)
    walk = SyntheticWalk.of(shaped, new_tokens, plan.store_prompts, plan.test_prompts)
    if len(walk.tests) < plan.test_prompts:
        note(f"{where} has {count_of(len(walk.tests), 'request')} to measure, not {plan.test_prompts}")
    return walk


def _possible(policies: Sequence[str], trace: RoutingTrace) -> Sequence[str]:
    """The policies that replayed routing has all inputs for; the others are named on stderr."""
    kept = []
    for name in policies:
        if name in SPECULATIVE:
            note(f"left out: {name}: it needs what gates read, and random weights make nothing of that kind")
        elif name in SEARCHING and trace.manifest.hidden_size is None:
            note(f"left out: {name}: it searches by embeddings, and the routing has none")
        else:
            kept.append(name)
    if ADAPTIVE in kept:
        note(f"{ADAPTIVE} does without what gates read: random weights make nothing of that kind")
    return kept


def _check_memory(
    plan: BenchPlan, source: ModelSource, size: ModelFootprint, room: MemoryRoom, walks: Sequence[SyntheticWalk]
) -> None:
    """Raise if not even the smallest budget fits, before anything is allocated."""
    experts = size.layers * size.experts
    budgets = [cache.resolve(size.slots_bytes, None) for cache in plan.caches if not cache.is_automatic]
    for budget in budgets:
        slots_within(budget, size.expert_bytes, experts, size.top_k)
    context = max(length_of(request) for walk in walks for request in (*walk.settling, *walk.tests))
    least = min(budgets, default=size.least_budget_bytes)
    if refused := room.refuse_offloaded(size, least, context):
        raise DeviceError(f"{source.name}: {refused}; give fewer --layers, a smaller --cache or another shape")

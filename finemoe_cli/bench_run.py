"""One run of live ``finemoe bench``: checked before anything slow, kept in the catalog, ended cleanly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.checkpoint import load_tokenizer
from engine.decoding import drives_itself
from engine.devices import choose_device, choose_dtype
from engine.errors import LosslessError
from engine.footprint import ModelFootprint, measure_model
from engine.machine import identify_machine
from engine.prompts import PromptSet
from engine.slots import slots_within
from engine.source import ModelSource
from finemoe_cli.bench_engines import BenchEngines
from finemoe_cli.bench_grid import LiveGrid
from finemoe_cli.bench_keeping import BenchKeeper
from finemoe_cli.bench_plan import BenchPlan
from finemoe_cli.bench_prompts import draw_prompts
from finemoe_cli.bench_stores import BenchStore
from finemoe_cli.console import note
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.profiles import find_profile
from finemoe_cli.settings import Settings


class LiveBench:
    """Prepares a grid, runs it, and keeps its records.

    Raises, while it is made:
        UsageError, BudgetError, DeviceError: the plan cannot be carried out with this model on this machine.
        StoreNotFoundError, StoreMismatchError, StoreError: of ``store``.
        DatasetError: the prompts cannot be read.
    """

    def __init__(
        self,
        settings: Settings,
        source: ModelSource,
        plan: BenchPlan,
        prompts: PromptSet,
        store: str | None,
        capacity: int | None,
        seed: int | None,
        options: Mapping[str, Any],
    ) -> None:
        """``store``: the user's, to read; ``capacity``: of a temporary one; ``options``: the command's, as given."""
        device, dtype = choose_device(settings.device.text), choose_dtype(settings.dtype.text, source.config)
        for executor in plan.executors:
            drives_itself(executor, device)
        machine = identify_machine(device, dtype)
        profile = find_profile(settings, source)
        if profile is not None and plan.distance is None:
            note(f"profile of this machine: prefetch distance {profile.distance}")
            plan = replace(plan, distance=profile.distance)
        _check_budgets(plan, source, measure_model(source.config, dtype, source.name))
        if store is None:
            contents = [prompts.identity, seed, plan.store_prompts, max(plan.new_tokens)]
            filled = BenchStore.temporary(source, capacity, plan.distance, contents)
        else:
            filled = BenchStore.copied(settings, source, store)
        drawn = draw_prompts(prompts, plan, load_tokenizer(source), source.context_length, filled.prompt_hashes)
        self._keeper = BenchKeeper(settings, source, machine, drawn.dataset, options)
        identity = self._keeper.identity(str(device), seed)
        self._interrupt = Interruptible()
        hardware = None if profile is None else profile.hardware
        engines = BenchEngines(settings, source, plan.distance or filled.maps.distance, hardware)
        self._grid = LiveGrid(settings, source, plan, drawn, filled, identity, engines, self._interrupt)

    def records(self) -> Iterator[dict[str, Any]]:
        """Measure; yield each record once the catalog holds it. Whatever ends it, the records so far are kept."""
        return self._keeper.keep(self._grid.measure(), self._interrupt, lambda: bool(self._grid.differing))

    def check_outcome(self) -> None:
        """Raise what ended the measurement before its time, or a LosslessError if tokens differed."""
        if self._keeper.ended_by is not None:
            raise self._keeper.ended_by
        if self._grid.differing:
            raise LosslessError(
                f"not lossless: {', '.join(self._grid.differing)} generated other tokens than {self._grid.reference}; "
                "please report this with the output of 'finemoe env'"
            )


def _check_budgets(plan: BenchPlan, source: ModelSource, size: ModelFootprint) -> None:
    experts = source.fingerprint.layers * source.fingerprint.experts
    for cache in plan.caches:
        if not cache.is_automatic:
            budget = cache.resolve(size.slots_bytes, None)
            slots_within(budget, size.expert_bytes, experts, source.fingerprint.top_k)

"""Whether a model may be opened with a budget on a device, and how many slots it then gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.budget import ExpertBudget
from engine.devices import free_bytes
from engine.footprint import estimate_cache_bytes
from engine.free_memory import free_host_bytes
from engine.memory_needs import MemoryNeeds, WeightSizes
from engine.slots import slot_bytes, slots_within
from engine.source import ModelSource

DEFAULT_CONTEXT = 4096


class Admission:
    """Weighs one model against one machine, before it is loaded and again once its weights are in memory.

    Args:
        context: tokens of a sequence that there has to be room for, at most as many as the model can take.
        caches: key/value caches of the sequence that are held at once.
        partitions: equal shares the slots are divided into.
        free_device, free_host: bytes that are free now.
    """

    def __init__(
        self,
        source: ModelSource,
        cache: ExpertBudget,
        device: torch.device,
        dtype: torch.dtype,
        context: int = DEFAULT_CONTEXT,
        caches: int = 1,
        partitions: int = 1,
        free_device: Callable[[torch.device], int | None] = free_bytes,
        free_host: Callable[[], int] = free_host_bytes,
    ) -> None:
        self._source = source
        self._cache = cache
        self._device = device
        self._dtype = dtype
        self._context = min(context, source.context_length or context)
        self._cache_bytes = caches * estimate_cache_bytes(source.config, dtype, self._context, source.name)
        self._partitions = partitions
        self._free_device = free_device
        self._free_host = free_host

    def admit(self, sizes: WeightSizes) -> MemoryNeeds:
        """What a model takes that is not loaded yet.

        Raises:
            BudgetError: the budget does not hold the K experts of one token.
            MemoryShortageError: the model does not fit.
        """
        return self._weigh(sizes, loaded=False)[0]

    def settle(self, sizes: WeightSizes) -> tuple[MemoryNeeds, int]:
        """What a model takes whose weights are in memory, and how many slots it gets; raises as ``admit`` does."""
        return self._weigh(sizes, loaded=True)

    def _weigh(self, sizes: WeightSizes, loaded: bool) -> tuple[MemoryNeeds, int]:
        slot = slot_bytes(sizes.expert_bytes)
        top_k = self._source.fingerprint.top_k
        least = top_k * self._partitions * slot
        needs = MemoryNeeds(
            name=self._source.name,
            device=self._device,
            dtype=self._dtype,
            experts_bytes=sizes.experts_bytes,
            dense_bytes=sizes.dense_bytes,
            slots_bytes=least,
            least_slots_bytes=least,
            cache_bytes=self._cache_bytes,
            context=self._context,
        )
        free, free_host = self._free_device(self._device), self._free_host()
        room = None
        if self._cache.is_automatic and free is not None:
            # An automatic budget is what is left, so what has to fit is the smallest one.
            _check(needs, loaded, free, free_host)
            room = free - self._cache_bytes - (0 if loaded else sizes.dense_bytes)
        budget = self._cache.resolve(sizes.experts * slot, room)
        slots = slots_within(budget, sizes.expert_bytes, sizes.experts, top_k, self._partitions)
        needs = replace(needs, slots_bytes=budget)
        _check(needs, loaded, free, free_host)
        return needs, slots


def _check(needs: MemoryNeeds, loaded: bool, free: int | None, free_host: int) -> None:
    (needs.without_weights() if loaded else needs).check(free, free_host)

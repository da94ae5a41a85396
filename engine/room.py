"""Whether a model's parts fit the memory there is now, told with all sizes before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.budget import format_bytes
from engine.devices import free_bytes
from engine.footprint import ModelFootprint
from engine.free_memory import free_host_bytes


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes that may still be taken; ``shared``: the device is the host's memory, which has to hold everything."""

    device: int
    host: int
    shared: bool

    @classmethod
    def of(cls, device: torch.device) -> MemoryRoom:
        host, free = free_host_bytes(), free_bytes(device)
        return cls(host if free is None else free, host, free is None)

    def refuse_offloaded(self, size: ModelFootprint, budget_bytes: int, context: int) -> str | None:
        """Why experts in host memory and so many bytes of slots do not fit, in a clause; None where they do."""
        on_device = size.dense_bytes + budget_bytes + size.cache_bytes(context)
        parts = (
            f"{format_bytes(size.dense_bytes)} of dense weights, {format_bytes(budget_bytes)} of expert slots and "
            f"{format_bytes(size.cache_bytes(context))} of key/value cache"
        )
        experts = f"{format_bytes(size.experts_bytes)} of experts"
        if self.shared:
            return self._compare(f"{experts}, {parts}", size.experts_bytes + on_device, "host", self.host)
        return self._compare(experts, size.experts_bytes, "host", self.host) or self._compare(
            parts, on_device, "device", self.device
        )

    def refuse_resident(self, size: ModelFootprint, context: int) -> str | None:
        """Why a model with all its experts does not fit the device; None where it does."""
        weights = size.dense_bytes + size.experts_bytes
        parts = f"{format_bytes(weights)} of weights and {format_bytes(size.cache_bytes(context))} of key/value cache"
        return self._compare(parts, weights + size.cache_bytes(context), "device", self.device)

    def _compare(self, parts: str, needed: int, where: str, has: int) -> str | None:
        return None if needed <= has else f"{parts} do not fit the {where}, which has {format_bytes(has)} free"

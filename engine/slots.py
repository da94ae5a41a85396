"""Device memory for experts: equal slots in one arena, seen through each layer's tensor layout."""

from __future__ import annotations

import torch

from engine.errors import BudgetError, MemoryShortageError
from engine.host_experts import HostExperts

_ALIGNMENT = 256


def slot_bytes(expert_bytes: int) -> int:
    """Bytes of one slot: the largest expert, rounded up so that every slot starts aligned for any kernel."""
    return -(-expert_bytes // _ALIGNMENT) * _ALIGNMENT


def slots_within(budget_bytes: int, expert_bytes: int, experts: int, top_k: int, partitions: int = 1) -> int:
    """How many slots a budget in bytes pays for, at most one for each of the model's ``experts``.

    Args:
        partitions: equal shares the slots are divided into, without a rest.

    Raises:
        BudgetError: a share does not hold the K experts one token needs in one layer.
    """
    size = slot_bytes(expert_bytes)
    slots = min(budget_bytes // size, experts) // partitions * partitions
    if slots < top_k * partitions:
        if partitions > 1:
            raise BudgetError(
                f"an expert budget of {budget_bytes:,} bytes does not hold {top_k} experts of {size:,} bytes for each "
                f"of {partitions} layers: give --cache at least {top_k * partitions * size:,} bytes, or another policy"
            )
        raise BudgetError(
            f"an expert budget of {budget_bytes:,} bytes holds {slots} experts of {size:,} bytes, but a token needs "
            f"{top_k} in one layer: give --cache at least {top_k * size:,} bytes"
        )
    return slots


class DeviceSlots:
    """``count`` slots on ``device``; memory is touched as slots are first filled.

    Raises:
        MemoryShortageError: the device has no memory for them.
    """

    def __init__(self, host: HostExperts, count: int, device: torch.device) -> None:
        size = slot_bytes(host.expert_bytes)
        self.count = count
        self.nbytes = count * size
        try:
            arena = torch.empty(self.nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's allocator raises a bare one
            raise MemoryShortageError(
                f"{device} has no memory for {count:,} expert slots of {size:,} bytes ({self.nbytes:,} in all): "
                "give a smaller --cache, or free memory there"
            ) from error
        start = -arena.data_ptr() % _ALIGNMENT
        self._arena = arena[start : start + self.nbytes].view(count, size)
        self._layouts = [host.layout(layer) for layer in range(host.layers)]
        # Layers of equal layout share their views, or a slot that wanders through the layers makes new ones each time.
        self._layout_ids = [self._layouts.index(layout) for layout in self._layouts]
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def bytes_of(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """uint8 [stop - start], a part of one slot."""
        return self._arena[slot, start:stop]

    def tensors(self, slot: int, layer: int) -> dict[str, torch.Tensor]:
        """The slot's bytes as the named tensors of one of ``layer``'s experts."""
        name = (slot, self._layout_ids[layer])
        views = self._views.get(name)
        if views is None:
            views = self._views[name] = self._layouts[layer].views(self._arena[slot])
        return views

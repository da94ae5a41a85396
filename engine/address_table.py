"""Where kernels find each expert: one address an expert, in device memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.host_experts import HostExperts
from engine.slots import DeviceSlots


class AddressTable:
    """An entry an expert, flat keys ``layer * J + expert``: the address of its device slot or of its host buffer.

    A switch is a copy of one entry from a page-locked list of every address it can have, so that switches in flight
    need no memory of their own.

    Attributes:
        entries: int64 [L * J] on the device.
        home: int64 [L * J] on the host, the addresses of the experts' host buffers.
        home_on_device: the same on the device.
    """

    def __init__(self, host: HostExperts, slots: DeviceSlots, device: torch.device) -> None:
        keys = [(layer, expert) for layer in range(host.layers) for expert in range(host.experts)]
        self.home = torch.tensor([host.buffer(*key).data_ptr() for key in keys], dtype=torch.int64)
        self._slots = torch.tensor([slots.bytes_of(s, 0, 1).data_ptr() for s in range(slots.count)], dtype=torch.int64)
        if device.type == "cuda":
            self.home, self._slots = self.home.pin_memory(), self._slots.pin_memory()
        self.entries = self.home.to(device, copy=True)
        self.home_on_device = self.home.to(device, copy=True)

    def write(self, residents: Mapping[int, int]) -> None:
        """Set all entries, on the current stream; key -> slot of those that are not at home."""
        table = self.home.clone()
        if residents:
            table[list(residents)] = self._slots[list(residents.values())]
        self.entries.copy_(table)

    def switch(self, key: int, slot: int) -> None:
        """Queue the switch of an entry to a slot on the current stream."""
        self.entries[key : key + 1].copy_(self._slots[slot : slot + 1], non_blocking=True)

    def point_home(self, key: int) -> None:
        """Queue the switch of an entry back to host memory on the current stream."""
        self.entries[key : key + 1].copy_(self.home[key : key + 1], non_blocking=True)

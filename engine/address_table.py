"""Where kernels find each expert: one address an expert, in device memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.host_experts import HostExperts
from engine.slots import DeviceSlots


class AddressTable:
    """An entry an expert, flat keys ``layer * J + expert``: the address of its device slot or of its host buffer.

    Attributes:
        entries: int64 [L * J] on the device.
        home: int64 [L * J] on the device, the addresses of the experts' host buffers.
        slots: int64 [slots] on the device, the addresses of the slots.
    """

    def __init__(self, host: HostExperts, slots: DeviceSlots, device: torch.device) -> None:
        keys = [(layer, expert) for layer in range(host.layers) for expert in range(host.experts)]
        home = torch.tensor([host.buffer(*key).data_ptr() for key in keys], dtype=torch.int64)
        places = torch.tensor([slots.bytes_of(s, 0, 1).data_ptr() for s in range(slots.count)], dtype=torch.int64)
        self.home = home.to(device)
        self.slots = places.to(device)
        self.entries = self.home.clone()

    def write(self, residents: Mapping[int, int]) -> None:
        """Set all entries while the device is idle; key -> slot of those that are not at home."""
        self.entries.copy_(self.home)
        if residents:
            keys = torch.tensor(list(residents), device=self.entries.device)
            self.entries[keys] = self.slots[list(residents.values())]

"""Bringing experts to slots nobody reads, beside the running tokens."""

from __future__ import annotations

from collections import deque

import torch

from engine.host_experts import HostExperts
from engine.slot_life import CopyStream
from engine.slots import DeviceSlots


class CudaCopies:
    """One CUDA stream on the copy engine."""

    def __init__(self, host: HostExperts, slots: DeviceSlots, device: torch.device) -> None:
        self._host = host
        self._slots = slots
        self._stream = torch.cuda.Stream(device)
        self._queued = 0
        self._under_way: deque[torch.cuda.Event] = deque()

    def fill(self, key: int, slot: int) -> int:
        layer, expert = divmod(key, self._host.experts)
        source = self._host.buffer(layer, expert)
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._slots.bytes_of(slot, 0, len(source)).copy_(source, non_blocking=True)
            event.record(self._stream)
        self._under_way.append(event)
        self._queued += 1
        return self._queued

    def completed(self) -> int:
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        return self._queued - len(self._under_way)


class HostCopies:
    """The device is a second region of main memory; a copy is done when the call returns."""

    def __init__(self, host: HostExperts, slots: DeviceSlots) -> None:
        self._host = host
        self._slots = slots
        self._done = 0

    def fill(self, key: int, slot: int) -> int:
        source = self._host.buffer(*divmod(key, self._host.experts))
        self._slots.bytes_of(slot, 0, len(source)).copy_(source)
        self._done += 1
        return self._done

    def completed(self) -> int:
        return self._done


def open_copies(host: HostExperts, slots: DeviceSlots, device: torch.device) -> CopyStream:
    return CudaCopies(host, slots, device) if device.type == "cuda" else HostCopies(host, slots)

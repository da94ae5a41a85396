"""The road from host memory to device slots: a memory copy on the CPU, copy streams on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.host_experts import HostExperts
from engine.slots import DeviceSlots

CHUNK_BYTES = 16 * 2**20


class Link(Protocol):
    """Moves experts. ``load_part`` and ``send`` run on the copy thread, the rest on the token loop's.

    Attributes:
        depth: copies begun by ``send`` that are worth having under way at once.
    """

    depth: int

    def load(self, layer: int, expert: int, slot: int) -> None:
        """Start moving a whole expert a gate has decided for; ``use`` waits for it."""
        ...

    def load_part(self, layer: int, expert: int, slot: int, start: int, stop: int) -> None:
        """Move bytes [start, stop) of an expert ahead of time; returns when they have arrived."""
        ...

    def send(self, layer: int, expert: int, slot: int) -> Callable[[], None]:
        """Begin to move a whole expert behind those sent before; the result waits until it has arrived."""
        ...

    def use(self, slot: int) -> None:
        """Order the coming computation behind the slot's bytes."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """The computation issued so far was the last that reads these slots for now."""
        ...

    def take_stall_seconds(self) -> float:
        """Seconds the computation waited for copies since the last call; the device must be idle."""
        ...


class HostLink:
    """The device is a second region of main memory; a copy is done when the call returns."""

    depth = 1

    def __init__(self, host: HostExperts, slots: DeviceSlots) -> None:
        self._host = host
        self._slots = slots

    def load(self, layer: int, expert: int, slot: int) -> None:
        self.load_part(layer, expert, slot, 0, self._host.layout(layer).nbytes)

    def load_part(self, layer: int, expert: int, slot: int, start: int, stop: int) -> None:
        self._slots.bytes_of(slot, start, stop).copy_(self._host.buffer(layer, expert)[start:stop])

    def send(self, layer: int, expert: int, slot: int) -> Callable[[], None]:
        self.load(layer, expert, slot)
        return _do_nothing

    def use(self, slot: int) -> None:
        """The bytes are there already."""

    def release(self, slots: Sequence[int]) -> None:
        """The computation is over when its call returns."""

    def take_stall_seconds(self) -> float:
        return 0.0


class CudaLink:
    """Two copy streams: decided loads must not queue behind a prefetch that was issued before them.

    A slot is overwritten only behind the event that follows the last kernel reading it, and read only
    behind the event that follows its copy; the host waits for neither.
    """

    # The next copy is queued while one is under way, so that the link does not wait for the host.
    depth = 2

    def __init__(self, host: HostExperts, slots: DeviceSlots, device: torch.device) -> None:
        self._host = host
        self._slots = slots
        self._device = device
        self._decided = torch.cuda.Stream(device, priority=-1)
        self._ahead = torch.cuda.Stream(device)
        self._arrived: list[torch.cuda.Event | None] = [None] * slots.count
        self._last_read: list[torch.cuda.Event | None] = [None] * slots.count
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def load(self, layer: int, expert: int, slot: int) -> None:
        size = self._host.layout(layer).nbytes
        self._copy(self._decided, layer, expert, slot, 0, size)
        arrived = torch.cuda.Event()
        arrived.record(self._decided)
        self._arrived[slot] = arrived

    def load_part(self, layer: int, expert: int, slot: int, start: int, stop: int) -> None:
        self._copy(self._ahead, layer, expert, slot, start, stop)
        # The copy thread waits here so that at most one chunk stands between a miss and the link.
        self._ahead.synchronize()
        self._arrived[slot] = None

    def send(self, layer: int, expert: int, slot: int) -> Callable[[], None]:
        self._copy(self._ahead, layer, expert, slot, 0, self._host.layout(layer).nbytes)
        self._arrived[slot] = None
        arrived = torch.cuda.Event()
        arrived.record(self._ahead)
        return arrived.synchronize

    def _copy(self, stream: torch.cuda.Stream, layer: int, expert: int, slot: int, start: int, stop: int) -> None:
        with torch.cuda.stream(stream):
            last_read = self._last_read[slot]
            if last_read is not None:
                stream.wait_event(last_read)
            target = self._slots.bytes_of(slot, start, stop)
            target.copy_(self._host.buffer(layer, expert)[start:stop], non_blocking=True)

    def use(self, slot: int) -> None:
        arrived = self._arrived[slot]
        if arrived is None:
            return
        self._arrived[slot] = None
        compute = torch.cuda.current_stream(self._device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(compute)
        compute.wait_event(arrived)
        after.record(compute)
        self._stalls.append((before, after))

    def release(self, slots: Sequence[int]) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        for slot in slots:
            self._last_read[slot] = event

    def take_stall_seconds(self) -> float:
        stalls, self._stalls = self._stalls, []
        return sum(before.elapsed_time(after) for before, after in stalls) / 1e3


def open_link(host: HostExperts, slots: DeviceSlots, device: torch.device) -> Link:
    return CudaLink(host, slots, device) if device.type == "cuda" else HostLink(host, slots)


def _do_nothing() -> None:
    """The bytes have arrived already."""

"""Transfers under a virtual clock: real bytes, real decisions, and the time model of a replay.

A live engine driven so decides from run to run what the replay of its own trace decides, whatever the machine does
meanwhile; real copy threads depend on its timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.cache import ExpertCache, Reservation
from engine.hardware import Hardware
from engine.host_experts import HostExperts
from engine.link_clock import LinkClock
from engine.links import Link
from engine.slots import DeviceSlots
from engine.steps import Traffic
from engine.transfers import TransferEngine


class VirtualTransferEngine(TransferEngine):
    """Prefetches make progress when the virtual device computes, and never otherwise."""

    def __init__(
        self, host: HostExperts, slots: DeviceSlots, cache: ExpertCache, link: Link, hardware: Hardware
    ) -> None:
        super().__init__(host, slots, cache, link)
        self._hardware = hardware
        self._clock = LinkClock(hardware, self._start_next, self._finish)
        self._under_way: Reservation | None = None
        self._half = 0.0

    @property
    def traffic(self) -> Traffic:
        """Totals since the engine started; stalls in virtual seconds."""
        return replace(super().traffic, stall_seconds=self._clock.stall)

    def start(self) -> None:
        """There is no thread to start: time passes as layers compute."""

    def arrive(self, position: int, tokens: int) -> None:
        self._half = self._hardware.layer_time(tokens) / 2
        self._clock.compute(self._half)
        super().arrive(position, tokens)

    def _interrupt_prefetch(self, waiting: Sequence[int]) -> None:
        # A prefetch in the only slot has to end before anything can take its place.
        if waiting or (self._under_way is not None and self.cache.slots == 1):
            self._clock.wait_for_arrival()
        else:
            self._clock.wait_for_piece()

    def _load(self, claims: Sequence[Reservation], pinned: list[int]) -> None:
        super()._load(claims, pinned)
        self._clock.load(len(claims))

    def _leave(self, used: Sequence[int], pinned: Sequence[int]) -> None:
        self._clock.compute(self._half)
        super()._leave(used, pinned)

    def _start_next(self) -> bool:
        self._under_way = self._reserve_prefetch()
        if self._under_way is None:
            return False
        self._clock.start()
        return True

    def _finish(self) -> None:
        reservation, self._under_way = self._under_way, None
        assert reservation is not None
        layer, expert = divmod(reservation.key, self._host.experts)
        size = self._host.layout(layer).nbytes
        self._link.load_part(layer, expert, reservation.slot, 0, size)
        self.cache.commit(reservation.key)
        self._meter.bytes_prefetched += size

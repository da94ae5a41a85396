"""Transfers under a virtual clock: real bytes, real decisions, and the time model of a replay.

A live engine driven so decides from run to run what the replay of its own trace decides, whatever the machine does
meanwhile; real copy threads depend on its timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from engine.cache import ExpertCache, Reservation, Residency
from engine.hardware import Hardware
from engine.host_experts import HostExperts
from engine.link_clock import LinkClock
from engine.links import Link
from engine.slots import DeviceSlots
from engine.steps import Traffic
from engine.streaming_transfers import StreamingTransfers


class VirtualTransferEngine(StreamingTransfers):
    """Prefetches make progress when the virtual device computes, and never otherwise."""

    def __init__(
        self, host: HostExperts, slots: DeviceSlots, cache: ExpertCache, link: Link, top_k: int, hardware: Hardware
    ) -> None:
        super().__init__(host, slots, cache, link, top_k)
        self._hardware = hardware
        self._clock = LinkClock(hardware, self._start_next, self._finish)
        self._under_way: Reservation | None = None
        self._decided = False
        self._half = self._share = 0.0

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

    def _serve_streamed(
        self, layer: int, experts: Sequence[int], counted: Mapping[int, int]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        self._share = self._half / len(experts)
        return super()._serve_streamed(layer, experts, counted)

    def _await_streamed(self, key: int) -> None:
        assert self._stream is not None
        self._stream.awaited = key
        while self.cache.residency(key) is not Residency.RESIDENT:
            self._clock.wait_for_next()
        self._stream.awaited = None

    def _computed(self, key: int) -> None:
        self._clock.compute(self._share)
        super()._computed(key)

    def _start_next(self) -> bool:
        if self._streaming:
            self._under_way, self._decided = self._reserve_streamed() or (None, False)
        else:
            self._under_way, self._decided = self._reserve_prefetch(), False
        if self._under_way is None:
            return False
        self._clock.start()
        return True

    def _finish(self) -> None:
        reservation, self._under_way = self._under_way, None
        assert reservation is not None
        self._send(reservation)()
        self._arrive(reservation.key, self._decided)

"""Transfers of iterations of many tokens, whose experts stream through the slots in the order of the layers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from engine.cache import ExpertCache, Reservation, Residency
from engine.host_experts import HostExperts
from engine.links import Link
from engine.prefill_stream import open_stream
from engine.slots import DeviceSlots
from engine.transfer_queue import Prefetch
from engine.transfers import TransferEngine


class StreamingTransfers(TransferEngine):
    """Streams what such an iteration needs (``PrefillStream``); other iterations are served as by the base class.

    The copy thread then carries out decided loads, too: one copy follows another without a gap, while experts that are
    there are computed. A policy's offers are passed over meanwhile.

    Args:
        top_k: K.
    """

    def __init__(self, host: HostExperts, slots: DeviceSlots, cache: ExpertCache, link: Link, top_k: int) -> None:
        super().__init__(host, slots, cache, link)
        self._rule = cache.rule
        self._stream = open_stream(cache.rule, host.layers, host.experts, top_k, cache.slots)
        self._streaming = False
        self._pinned: set[int] = set()

    def begin(self, tokens: int) -> None:
        """An iteration of so many tokens, padding left out, follows."""
        with self._work:
            self._stop()
            if self._stream is not None and self._stream.begin(tokens, self.cache.held_keys):
                self._queue.drop_prefetches()
                self.cache.rule = self._stream
                self._streaming = True
                self._work.notify()

    def offer(self, prefetches: Sequence[Prefetch]) -> None:
        if not self._streaming:
            super().offer(prefetches)

    def lend_slots(self) -> dict[int, int]:
        with self._work:
            self._stop()
        return super().lend_slots()

    def serve(
        self, layer: int, experts: Sequence[int], counted: Mapping[int, int]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        served = self._serve_streamed if self._streaming else super().serve
        return served(layer, experts, counted)

    def _serve_streamed(
        self, layer: int, experts: Sequence[int], counted: Mapping[int, int]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield resident experts, then the others as they arrive; each may leave when the next is asked for."""
        stream = self._stream
        assert stream is not None
        base = layer * self._host.experts
        with self._work:
            self._check()
            resident, late, absent = self._plan(base, experts, counted)
            self._pinned.update(resident, late)
            stream.decide({base + expert: tokens for expert, tokens in counted.items()}, absent)
            self._work.notify()
        try:
            for key in [*resident, *late, *absent]:
                self._await_streamed(key)
                yield key - base, self._tensors(key, layer)
                self._computed(key)
        finally:
            with self._work:
                stream.end_layer()
                self._urgent.clear()
                self._link.release([self.cache.slot(key) for key in self._pinned])
                while self._pinned:
                    self.cache.unpin(self._pinned.pop())

    def _await_streamed(self, key: int) -> None:
        stream = self._stream
        assert stream is not None
        with self._arrived:
            if self.cache.residency(key) is Residency.RESIDENT:
                return
            stream.awaited = key
            self._work.notify()
            start = time.perf_counter()
            while self.cache.residency(key) is not Residency.RESIDENT:
                self._check()
                self._arrived.wait()
            stream.awaited = None
            self._meter.stall_seconds += time.perf_counter() - start

    def _computed(self, key: int) -> None:
        """Nothing that is issued from now on reads the expert."""
        with self._work:
            self._link.release([self.cache.slot(key)])
            self._pinned.remove(key)
            self.cache.unpin(key)
            self._work.notify()

    def _stop(self) -> None:
        if self._streaming:
            assert self._stream is not None
            self._streaming = False
            self._stream.abandon()
            self.cache.rule = self._rule

    def _find_copy(self) -> Callable[[], None] | None:
        if not self._streaming:
            return super()._find_copy()
        first = self._reserve_streamed()
        return None if first is None else partial(self._stream_from, *first)

    def _reserve_streamed(self) -> tuple[Reservation, bool] | None:
        """A slot for what is to be sent now, and whether a gate has decided for it."""
        assert self._stream is not None
        load = self._stream.next_load(self._holds)
        if load is None:
            return None
        reservation = self.cache.reserve(load.key, load.worth, load.decided)
        if reservation is None:
            return None
        if load.decided:
            self.cache.pin(load.key)
            self._pinned.add(load.key)
        self._count_eviction(reservation)
        return reservation, load.decided

    def _stream_from(self, reservation: Reservation, decided: bool) -> None:
        """Send this expert and what comes next, until nothing does."""
        under_way = deque([(reservation, decided, self._send(reservation))])
        while under_way:
            following = None
            if len(under_way) < self._link.depth:
                with self._work:
                    following = self._reserve_streamed() if self._streaming and not self._closing else None
            if following is not None:
                under_way.append((*following, self._send(following[0])))
            reservation, decided, wait = under_way.popleft()
            wait()
            with self._arrived:
                self._arrive(reservation.key, decided)
                self._arrived.notify()

    def _send(self, reservation: Reservation) -> Callable[[], None]:
        layer, expert = divmod(reservation.key, self._host.experts)
        return self._link.send(layer, expert, reservation.slot)

    def _arrive(self, key: int, decided: bool) -> None:
        self.cache.commit(key)
        size = self._host.layout(key // self._host.experts).nbytes
        if decided:
            self._meter.bytes_on_demand += size
        else:
            self._meter.bytes_prefetched += size

    def _holds(self, key: int) -> bool:
        return self.cache.slot(key) >= 0
